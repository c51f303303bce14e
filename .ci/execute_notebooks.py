"""How nbconvert writes the committed notebooks: facts only, no times and no versions of the machine that ran them."""

from nbconvert.preprocessors import CoalesceStreamsPreprocessor, Preprocessor

c = get_config()  # type: ignore[name-defined]  # noqa: F821 - given by nbconvert, which reads this file
c.ExecutePreprocessor.record_timing = False
c.ClearMetadataPreprocessor.enabled = True
c.ClearMetadataPreprocessor.clear_cell_metadata = False  # papermill reads the tag of the parameters cell there
c.ClearMetadataPreprocessor.preserve_nb_metadata_mask = {"kernelspec", ("language_info", "name")}


class WithoutModels(Preprocessor):
    """A view without its kernel shows nothing: an empty model id hides it, where a dead one would show an error."""

    def preprocess_cell(self, cell, resources, index):  # type: ignore[no-untyped-def]
        for output in cell.get("outputs", ()):
            if view := output.get("data", {}).get("application/vnd.jupyter.widget-view+json"):
                view["model_id"] = ""
        return cell, resources


c.CoalesceStreamsPreprocessor.enabled = True  # what a cell prints is one text, however it came
c.NotebookExporter.preprocessors = [WithoutModels, CoalesceStreamsPreprocessor]
