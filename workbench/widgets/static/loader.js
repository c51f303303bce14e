// A few lines that a saved notebook may keep; the views themselves come from the kernel, once for each page.
const loaded = (globalThis.workbenchViews ??= new Map());

function views(model) {
  const version = model.get("version");
  if (!loaded.has(version)) {
    loaded.set(version, new Promise((resolve, reject) => {
      const late = setTimeout(() => {
        loaded.delete(version);
        reject(new Error("this view needs its kernel: run the cell again"));
      }, 20000);
      const heard = (message, buffers) => {
        if (message.module !== version) return;
        clearTimeout(late);
        model.off("msg:custom", heard);
        const url = URL.createObjectURL(new Blob([buffers[0]], { type: "text/javascript" }));
        import(url).then(resolve, reject);
      };
      model.on("msg:custom", heard);
      model.send({ call: "module" });
    }));
  }
  return loaded.get(version);
}

export default {
  async render({ model, el }) {
    try {
      return await (await views(model)).render({ model, el });
    } catch (error) {
      el.textContent = String(error.message ?? error);
    }
  },
};
