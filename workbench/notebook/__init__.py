"""Pictures, views and magics for notebooks, and the course.

    draw              static pictures and tables
    lessons           the course
    magics            %%ranks and %ranks
    moments           the base of views that change something, and work in a saved page
    recorded_figures  figures measured on GPUs, recorded or live
    replay_rehearsal  a stand-in for CUDA graphs on a CPU, for lessons and tests
    show              `show`: picture and view of any object
    views             interactive views
"""
