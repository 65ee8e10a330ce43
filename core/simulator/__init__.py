"""The engine's scheduling under a virtual clock: the same scheduler, policy, victim rule, KV cache manager and prefix index,
with a cost model in the place of the device. Nothing here imports torch.

    traces.py, synthetic.py  ->  requests.py       what is asked, when, and which prompts begin alike
    variants.py, assembly.py ->  replica.py        EngineCore over executor.py, which moves the clock by step_cost.py
    simulation.py            ->  measures.py       a workload through a replica, what came of it
                             ->  report.py         an object for --json, a table
"""
