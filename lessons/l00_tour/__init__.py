"""What "The tour" alone uses.

    pass_chips  passes on and off, and their order
    tour        recorded steps and slow products; graders
"""
