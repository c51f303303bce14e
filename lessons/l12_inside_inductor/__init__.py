"""What "Inside Inductor" alone uses.

    pictures  buffers and the memory they reuse
"""
