"""What the views share that change something and answer at once: in a page without a kernel, too.

    moment  the base of all of them, which lie in their lessons
    page    what makes them work in a page without a kernel
"""
