"""The way from a recipe to a report: build, run, train, prove.

    build           recipe to compiled step
    expert_load     tokens that each expert got
    gpu_communication  which events of a GPU's profile communicate
    machine         machine and versions of a figure
    measured_run    a profiled step in the form of the simulated one
    progress        what runs now, on a terminal, in a notebook or line by line
    proofs          what runs a step on real ranks, for verdicts
    recipe_ranks    whose ranks a recipe runs on
    report          Report: what `run` returns, as data, text and HTML
    report_text     verdicts as text
    roofline        matmul ceiling of this machine
    run             recipe to report, on any world
    run_passes      run a list of passes, with a record of each
    stages          what a recipe decides of each stage
    step_profile    one step under torch's profiler
    text_data       byte-level text to train on
    train           the training loop
"""
