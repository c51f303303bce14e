"""How nbconvert writes the committed notebooks: facts only, no times and no versions of the machine that ran them."""

import json
import re

import nbformat
from nbconvert.preprocessors import CoalesceStreamsPreprocessor, ExecutePreprocessor, Preprocessor

# nbclient answers an Output widget, such as interact's, while it waits for the cell's reply, and may wait for ever (its
# issue 312); without the answer such outputs are the cell's
ExecutePreprocessor.on_comm_open_jupyter_widget = lambda *_: None
c = get_config()  # type: ignore[name-defined]  # noqa: F821 - given by nbconvert, which reads this file
c.ExecutePreprocessor.record_timing = False
c.ClearMetadataPreprocessor.enabled = True
c.ClearMetadataPreprocessor.clear_cell_metadata = False  # papermill reads the tag of the parameters cell there
c.ClearMetadataPreprocessor.preserve_nb_metadata_mask = {"kernelspec", ("language_info", "name"), "widgets"}


STATE, VIEW = "application/vnd.jupyter.widget-state+json", "application/vnd.jupyter.widget-view+json"


def reached(models, name, seen):  # type: ignore[no-untyped-def]
    """The names of a widget model and of all that its state refers to: children, layouts, controls."""
    if name not in seen and name in models:
        seen[name] = models[name]
        for other in re.findall(r"IPY_MODEL_(\w+)", json.dumps(models[name])):
            reached(models, other, seen)
    return seen


class OwnDataOnly(Preprocessor):
    """Keep the models of views that hold their own data, under names that are the same in each run.

    Any other view or control shows nothing without its kernel: an empty model id hides it, where a dead one would show
    an error, and its text would be a stub.
    """

    def preprocess(self, nb, resources):  # type: ignore[no-untyped-def]
        models, kept = nb.metadata.pop("widgets", {}).get(STATE, {}).get("state", {}), {}
        shown = [o.get("data", {}) for cell in nb.cells for o in cell.get("outputs", ())]
        for data in (data for data in shown if VIEW in data):
            view = data[VIEW]
            found = reached(models, view["model_id"], {})
            if any("data" in each["state"] and "_esm" in each["state"] for each in found.values()):
                kept |= found
            else:
                view["model_id"] = data["text/plain"] = ""
        text = json.dumps(nb)
        state = json.dumps({STATE: {"state": kept, "version_major": 2, "version_minor": 0}}, sort_keys=True)
        for i, name in enumerate(kept):
            text, state = (each.replace(name, f"{i:032x}") for each in (text, state))
        nb = nbformat.from_dict(json.loads(text))
        if kept:
            nb.metadata["widgets"] = json.loads(state)
        return nb, resources


c.CoalesceStreamsPreprocessor.enabled = True  # what a cell prints is one text, however it came
c.NotebookExporter.preprocessors = [OwnDataOnly, CoalesceStreamsPreprocessor]
