"""What "The tour" alone uses.

    tour  recorded steps and slow products; graders
"""
