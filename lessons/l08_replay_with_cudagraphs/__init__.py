"""What "Replay with CUDA graphs" alone uses.

    pictures  from where a CUDA graph reads its inputs
"""
