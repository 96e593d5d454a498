// The search of the site runs in a worker, and browsers start no worker for a page that is read from the disk. There a
// hidden frame takes its place: it loads the same script, in the same thread as the page. A served page keeps its worker.
// The plugin "offline" would load a file of this name from the network, and does not where the site has its own.
if (location.protocol === "file:") {
  window.Worker = class IFrameWorker extends EventTarget {
    constructor(address) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.appendChild(frame);
      this.scope = frame.contentWindow;
      // What the script calls to answer; the page listens to this object.
      const answer = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      this.ready = new Promise((resolve, reject) => {
        this.scope.postMessage = answer;
        const script = frame.contentDocument.createElement("script");
        script.onload = resolve;
        script.onerror = () => reject(new Error(`${address} could not be loaded`));
        script.src = address;
        frame.contentDocument.body.appendChild(script);
      });
    }

    postMessage(data) {
      this.ready.then(() => this.scope.dispatchEvent(new MessageEvent("message", { data })));
    }
  };
}
