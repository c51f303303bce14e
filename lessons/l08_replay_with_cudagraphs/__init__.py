"""What "Replay with CUDA graphs" uses; lessons 11 and 15 use `launch_bound`, too.

    flat_replay       a wrapper that treats a boxed call as a flat one
    launch_bound      launches against work
    measured_steps    steps of one layer on a GPU
    pictures          from where a recording reads its inputs
    rehearsed         a small model's step to record, and loops that train it
    replay_rehearsal  a stand-in for CUDA graphs on a CPU
"""
