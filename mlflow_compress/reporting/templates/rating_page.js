// Keeps the choices in the browser, and saves them as a CSV file. Nothing is sent anywhere.
const form = document.getElementById("ratings");
const rater = document.getElementById("rater");
const pairs = [...form.querySelectorAll("article")];
const store = `ratings-${form.dataset.sheet}`;
const progress = document.getElementById("progress");
const warning = document.getElementById("not-kept");

const chosen = (pair) => pair.querySelector("input:checked")?.value ?? "";

function count() {
  const rated = pairs.filter((pair) => chosen(pair)).length;
  progress.textContent = `${rated} of ${pairs.length} rated`;
}

function keep() {
  count();
  try {
    localStorage.setItem(store, JSON.stringify({ rater: rater.value, choices: Object.fromEntries(pairs.map((pair) => [pair.id, chosen(pair)])) }));
  } catch {
    warning.hidden = false;
  }
}

function recall() {
  let kept = null;
  try {
    kept = JSON.parse(localStorage.getItem(store));
  } catch {
    warning.hidden = false;
  }
  if (kept === null) return;
  rater.value = kept.rater;
  for (const pair of pairs) {
    for (const button of pair.querySelectorAll("input")) button.checked = button.value === kept.choices[pair.id];
  }
}

function save() {
  const lines = ["id,choice", ...pairs.map((pair) => `${pair.id},${chosen(pair)}`)];
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([`${lines.join("\r\n")}\r\n`], { type: "text/csv" }));
  link.download = `${rater.value.replace(/[^A-Za-z0-9_.-]+/g, "_") || "ratings"}.csv`;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}

form.addEventListener("submit", (event) => {
  event.preventDefault();
  save();
});
form.addEventListener("input", keep);
recall();
count(); // and nothing is kept before a choice: a page that opens must not write over what another has just kept
