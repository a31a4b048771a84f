// The script of a report's page on a stand-in for a browser's page: `node page_dom.js < JSON`.
//
// The JSON has the page as a tree of {tag, attributes, children}, in which a text is a string, its script, and
// what a reader does: [{set: {NAME: VALUE}}, {click: ID}, {reset: true}, ...]. For the page as it opens and after
// each act a JSON line says what is seen. What a browser would not do throws: a select takes values that it has.
"use strict";
const { tree, script, acts } = JSON.parse(require("fs").readFileSync(0, "utf8"));

class Element {
  constructor({ tag, attributes, children }) {
    this.tag = tag;
    this.attributes = attributes;
    this.id = attributes.id;
    this.hidden = "hidden" in attributes;
    this.open = "open" in attributes;
    this.dataset = {};
    for (const [name, value] of Object.entries(attributes)) {
      if (name.startsWith("data-")) this.dataset[name.slice(5)] = value;
    }
    this.children = children.map((child) => (typeof child === "string" ? child : new Element(child)));
    this.listeners = {};
    this.value = "";
  }

  get textContent() {
    return this.children.map((child) => (typeof child === "string" ? child : child.textContent)).join("");
  }

  set textContent(text) {
    this.children = [text];
  }

  *descendants() {
    for (const child of this.children) {
      if (typeof child === "string") continue;
      yield child;
      yield* child.descendants();
    }
  }

  querySelectorAll(selector) {
    const fits = selector.startsWith(".")
      ? (element) => (element.attributes.class ?? "").split(" ").includes(selector.slice(1))
      : (element) => element.tag === selector;
    return [...this.descendants()].filter(fits);
  }

  querySelector(selector) {
    return this.querySelectorAll(selector)[0] ?? null;
  }

  addEventListener(kind, listener) {
    (this.listeners[kind] ??= []).push(listener);
  }

  dispatch(kind) {
    const event = { prevented: false, preventDefault: () => { event.prevented = true; } };
    for (const listener of this.listeners[kind] ?? []) listener(event);
    return event;
  }
}

const root = new Element(tree);
const timers = [];
const document = {
  getElementById: (id) => [...root.descendants()].find((element) => element.id === id) ?? null,
  querySelectorAll: (selector) => root.querySelectorAll(selector),
};
const fields = (form) => [...form.descendants()].filter((element) => ["select", "input"].includes(element.tag));
class FormData {
  constructor(form) {
    this.values = new Map(fields(form).map((field) => [field.attributes.name, field.value]));
  }

  get(name) {
    return this.values.get(name) ?? null;
  }
}

const form = document.getElementById("filter");

function act({ set, click, reset, submit }) {
  for (const [name, value] of Object.entries(set ?? {})) {
    const field = fields(form).find((each) => each.attributes.name === name);
    const choices = field.querySelectorAll("option").map((option) => option.attributes.value);
    if (field.tag === "select" && !choices.includes(value)) throw new Error(`${name} has no ${value}`);
    field.value = value;
  }
  if (set) form.dispatch("input");
  if (click) document.getElementById(click).dispatch("click");
  if (submit && !form.dispatch("submit").prevented) throw new Error("the form was sent");
  if (reset) {
    form.dispatch("reset"); // the fields are as they were only behind it
    for (const field of fields(form)) field.value = "";
  }
  for (const run of timers.splice(0)) run();
}

function seen() {
  return {
    form: !form.hidden,
    says: form.querySelector("output").textContent,
    groups: root.querySelectorAll(".group").filter((group) => !group.hidden).map((group) => ({
      ...group.dataset,
      open: group.open,
      samples: group.querySelectorAll(".sample").filter((each) => !each.hidden).map((each) => each.dataset.reward),
    })),
  };
}

new Function("document", "FormData", "setTimeout", script)(document, FormData, (run) => timers.push(run));
console.log(JSON.stringify(seen()));
for (const each of acts) {
  act(each);
  console.log(JSON.stringify(seen()));
}
