"use strict";
/* As much of a browser as train/web/viewer.js uses, to run it under Node: node mini_dom.js viewer.js data.json.
   Prints, for every episode and turn, the texts a reader sees. Anything that would parse markup throws. */

const fs = require("fs");
const vm = require("vm");

class Element {
  constructor(tag) {
    Object.assign(this, { tag, children: [], attributes: {}, dataset: {}, className: "", scrollTop: 0, listeners: {} });
    this.style = { setProperty: (name, value) => { this.style[name] = value; } };
    const has = () => this.className.split(" ").filter(Boolean);
    this.classList = {
      add: (name) => { this.className = [...has(), name].join(" "); },
      remove: (name) => { this.className = has().filter((other) => other !== name).join(" "); },
      toggle: (name, on) => { this.classList.remove(name); if (on) this.classList.add(name); },
    };
  }
  append(...nodes) { this.children.push(...nodes.map((node) => (node instanceof Element ? node : String(node)))); }
  appendChild(node) { this.children.push(node); return node; }
  replaceChildren(...nodes) { this.children = []; this.append(...nodes); }
  remove() {}
  setAttribute(name, value) { this.attributes[name] = String(value); }
  addEventListener(name, listener) { this.listeners[name] = listener; }
  getBoundingClientRect() { return { top: 0, bottom: 0, left: 0, width: 100 }; }
  scrollIntoView() {}
  get childElementCount() { return this.children.filter((node) => node instanceof Element).length; }
  get textContent() { return this.children.map((node) => (node instanceof Element ? node.textContent : node)).join(""); }
  set textContent(text) { this.children = [String(text)]; }
  set innerHTML(_) { throw new Error("markup"); }
  set outerHTML(_) { throw new Error("markup"); }
  insertAdjacentHTML() { throw new Error("markup"); }
  *all(css) {
    for (const node of this.children) {
      if (!(node instanceof Element)) continue;
      if (!css || node.className.split(" ").includes(css)) yield node;
      yield* node.all(css);
    }
  }
  texts(css) { return [...this.all(css)].map((node) => node.textContent); }
}

const [script, data] = process.argv.slice(2).map((path) => fs.readFileSync(path, "utf8"));
const root = new Element("section");
const island = new Element("script");
island.textContent = data;
const keys = {};
const page = {
  document: {
    createElement: (tag) => new Element(tag),
    createElementNS: (_, tag) => new Element(tag),
    getElementById: (id) => ({ viewer: root, episodes: island })[id] ?? null,
    documentElement: new Element("html"),
  },
  addEventListener: (name, listener) => { keys[name] = listener; },
  history: { replaceState() {} }, location: { hash: "" }, innerHeight: 1000, URLSearchParams,
};
vm.runInNewContext(script, page);

const press = (key) => keys.keydown({ key, target: {}, preventDefault() {} });
const episodes = [...root.all("card")].map((card) => {
  card.onclick();
  const turns = [];
  for (;;) {
    const [context] = root.all("context");
    for (const details of context.all("gone")) { details.open = true; details.listeners.toggle(); }
    const live = context.children.filter((node) => node.tag === "article");
    turns.push({
      where: root.texts("where")[0],
      context: live.map((box) => [...box.all("text")].map((node) => node.textContent).join("")),
      kinds: live.map((box) => box.className),
      gone: [...context.all("removed")].map((box) => [...box.all("text")].map((node) => node.textContent).join("")),
      side: root.texts("panel"),
      facts: root.texts("budget")[0],
    });
    press("ArrowRight");
    if (root.texts("where")[0] === turns.at(-1).where) break;
  }
  press("Home");
  return { card: card.textContent, question: root.texts("question")[0], home: root.texts("where")[0], turns };
});
console.log(JSON.stringify({ episodes, tags: [...new Set([...root.all()].map((node) => node.tag))].sort() }));
