"""What model plugins are made of. Every module here imports torch: use it in the engine process only.
 Layers are plain objects, not `torch.nn.Module`s: a step of a small model on a CPU is dominated by dispatch, so each
layer binds what it calls once, at construction or at the end of the load.
"""
