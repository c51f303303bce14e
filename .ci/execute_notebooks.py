"""How nbconvert writes the committed notebooks: facts only, no times and no versions of the machine that ran them."""

c = get_config()  # type: ignore[name-defined]  # noqa: F821 - given by nbconvert, which reads this file
c.ExecutePreprocessor.record_timing = False
c.ClearMetadataPreprocessor.enabled = True
c.ClearMetadataPreprocessor.clear_cell_metadata = False  # papermill reads the tag of the parameters cell there
c.ClearMetadataPreprocessor.preserve_nb_metadata_mask = {"kernelspec", ("language_info", "name")}
