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
const listed = (names) => names.slice(0, 12).join(", ") + (names.length > 12 ? ` and ${names.length - 12} more` : "");

/** Call `act` after the last of several quick calls. */
function settled(act, wait = 120) {
  let timer;
  return () => {
    clearTimeout(timer);
    timer = setTimeout(act, wait);
  };
}

/** Note a fragment in the address, as a link that was clicked would. */
function note(fragment) {
  try {
    history.replaceState(null, "", fragment);
  } catch {
    // An address that the browser keeps fixed stays as it is; the page works without.
  }
}

// In MLflow's artifact view the page is a sandboxed blob. There a link within the page is refused as a new page would be,
// and a link to a run opens nothing. So the page goes to its own parts by itself, and says how to reach a run.
document.addEventListener("click", (event) => {
  const link = event.target.closest?.('a[href^="#"]');
  if (!link) return;
  event.preventDefault();
  const target = byId(link.getAttribute("href").slice(1).split("?")[0]);
  note(link.getAttribute("href"));
  target.scrollIntoView();
  target.focus({ preventScroll: true });
});
if (location.protocol === "blob:") byId("framed").hidden = false;
