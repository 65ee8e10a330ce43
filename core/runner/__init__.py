"""The runner side of a step: persistent batch, model runner (the Worker), sampler. Engine process only: it imports
torch."""
