"""What a notebook shows, and the course.

    draw              static pictures and tables
    lessons           the course
    magics            %%ranks and %ranks
    recorded_figures  figures measured on GPUs, recorded or live
    show              `show`: the right picture for an object
    views             interactive views
"""
