// The page's data and small helpers. Everything is written with textContent: what a model wrote is never read as markup.
"use strict";
document.documentElement.classList.add("js");

const byId = (id) => document.getElementById(id);

/** Return a new element with attributes and children; texts become text nodes. */
function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) if (value != null) made.setAttribute(key, value);
  made.append(...children.filter((child) => child != null));
  return made;
}

/** Fill a <select> with [value, text] pairs. */
function fill(select, pairs, chosen) {
  select.replaceChildren(...pairs.map(([value, text]) => element("option", { value }, text)));
  if (chosen !== undefined && pairs.some(([value]) => value === chosen)) select.value = chosen;
}

/** Return the embedded data: base64 of compressed JSON. No request is made for it. */
async function unpack() {
  const bytes = Uint8Array.from(atob(byId("data").textContent), (character) => character.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return JSON.parse(await new Response(stream).text());
}

const percent = (thousandths) => (thousandths / 10).toFixed(1) + " %";
const counted = (n, one, many) => n.toLocaleString("en") + " " + (n === 1 ? one : many);

/** Call `act` after the last of several quick calls. */
function settled(act, wait = 120) {
  let timer;
  return () => {
    clearTimeout(timer);
    timer = setTimeout(act, wait);
  };
}

// Tables that scroll sideways can be reached with the keyboard; those of the single report say so here.
for (const box of document.querySelectorAll(".scroll:not([tabindex])"))
  Object.entries({ tabindex: "0", role: "region", "aria-label": "table" }).forEach(([key, value]) => box.setAttribute(key, value));
