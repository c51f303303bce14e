"""What this machine takes.

    calibrate  measure this machine, for simulated timelines of it
"""
