// A few lines that a saved notebook may keep; the views themselves come from the kernel, once for each page.
const loaded = (globalThis.workbenchViews ??= new Map());

function views(model) {
  const version = model.get("version");
  if (!loaded.has(version)) {
    loaded.set(version, new Promise((resolve, reject) => {
      const heard = (message, buffers) => {
        if (message.module !== version) return;
        model.off("msg:custom", heard);
        const url = URL.createObjectURL(new Blob([buffers[0]], { type: "text/javascript" }));
        import(url).then(resolve, reject);
      };
      model.on("msg:custom", heard); // however long other cells keep the kernel busy
      model.send({ call: "module" });
    }));
  }
  return loaded.get(version);
}

export default {
  async render({ model, el }) {
    const note = document.createElement("div");
    note.textContent = "this view waits for its kernel …";
    el.append(note);
    try {
      const { render } = await views(model);
      note.remove();
      return await render({ model, el });
    } catch (error) {
      note.textContent = String(error.message ?? error);
    }
  },
};
