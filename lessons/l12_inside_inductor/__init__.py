"""What "Inside Inductor" alone uses.

    buffers      the memory of the code that Inductor wrote
    measured     peaks on a GPU
    nan_asserts  which tensor an assert stopped at
    pictures     buffers and the memory they reuse; a loss in parts
    traffic      the loads and stores of generated loops
"""
