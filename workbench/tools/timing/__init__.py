"""What machines take, and what a traced job shows of it.

    calibrate   measure this machine, for simulated timelines of it
    order       what is exposed, what hides it, and what keeps it from hiding
    trace_file  torch.profiler's files
"""
