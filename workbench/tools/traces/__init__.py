"""Traces of any job's steps: what communicates, what hides it, and why the rest is exposed. Nothing here imports torch.

    order       per step: exposed, hidden behind what, idle, launches
    trace_file  a torch.profiler trace as GPU events by step
"""
