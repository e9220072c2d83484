// The search runs in a Worker, which browsers refuse to pages opened from a folder. There its script runs in a hidden
// frame instead, and messages are handed over as events, copied as a Worker would copy them.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      this.frame.srcdoc = "<!doctype html>";
      this.ready = new Promise((resolve) => {
        this.frame.onload = () => {
          this.frame.onload = null;
          const inside = this.frame.contentWindow;
          inside.postMessage = (data) => {
            const event = new MessageEvent("message", { data: structuredClone(data) });
            this.dispatchEvent(event);
            if (this.onmessage) this.onmessage(event);
          };
          const script = inside.document.createElement("script");
          script.src = new URL(url, document.baseURI);
          script.onload = resolve;
          inside.document.body.append(script);
        };
      });
      document.documentElement.append(this.frame);
    }
    postMessage(data) {
      this.ready.then(() => this.frame.contentWindow.dispatchEvent(new MessageEvent("message", { data: structuredClone(data) })));
    }
    terminate() {
      this.frame.remove();
    }
  };
}
