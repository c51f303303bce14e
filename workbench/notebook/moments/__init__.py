"""Views that change something and answer at once: with their data inside, they also work in a page without a kernel.

    collective_order  move a collective's start and wait
    graders           what a checkpoint takes of them
    list_race         which list of passes is fastest, by tokens and link
    moment            the base of all of them
    order_pass        an order made by hand, as a pass
    page              what makes them work in a page without a kernel
    partitioner       save a tensor, or compute it again
    pass_chips        passes on and off, and their order
    placement_lab     mesh axes on the dimensions of two factors
    program_counters  which rank launches which collective next
"""
