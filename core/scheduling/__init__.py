"""The scheduling mechanism: states, budget, allocation, preemption, plan builder. Pure Python, no device, no clock of
its own.
"""
