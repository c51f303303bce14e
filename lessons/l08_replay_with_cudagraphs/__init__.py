"""What "Replay with CUDA graphs" uses; lessons 11 and 15 use `launch_bound`, too.

    launch_bound  does the CPU or the device set the pace
    pictures      from where a CUDA graph reads its inputs: drawn, and listed
    whole_sum     a grader: an exact sum
"""
