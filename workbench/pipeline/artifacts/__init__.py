"""A compiled step as files: written by one process, loaded by every rank without capture or compilation.

    code       one graph or compiled callable as a Python file, with what it takes and returns
    compiled   compile_recipe: the recipe as each of its ranks, on a fake world
    folder     the artifact's files: manifest, fingerprint, and refusals that name the difference
    groups     process groups under names that are the same on every rank
    loaded     the step that runs an artifact's code on this rank
    run        run_artifact: train from an artifact, and report
"""
