"""Measuring a server or an engine: what is asked and when (workload, prompts), who is asked (http_target, engine_target),
the run (runner), what its records say (measure), and how that is shown (report, picture, comparison).

Nothing here knows the command line. Times are seconds, from the run's beginning where they are moments; lengths are tokens.
"""
