"""What "Capture a joint graph" alone uses.

    step_memory  bytes alive by kind: drawn, and graded
"""
