#!/usr/bin/env bash
# Bundles the libraries of the page over variants into the package, with their licences. Needs npm.
set -euo pipefail
cd "$(dirname "$0")"
target=../../mlflow_compress/reporting/page/vendor
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cp package.json package-lock.json libraries.js "$work"
cd "$work"
npm ci --no-audit --no-fund
version() { node -p "JSON.parse(require('fs').readFileSync('node_modules/$1/package.json')).version"; }
versions="Observable Plot $(version @observablehq/plot), jsdiff $(version diff)"
npx esbuild libraries.js --bundle --minify --format=iife --global-name=Libraries --target=es2020 \
  --legal-comments=none --metafile=meta.json --outfile=libraries.min.js \
  "--banner:js=/* $versions and what they need; licences in LICENSES.txt. Made by tools/page_libraries/build.sh. */"
# Only the packages of which something is in the bundle.
node -e '
  const fs = require("fs");
  const names = new Set(Object.entries(Object.values(require("./meta.json").outputs)[0].inputs)
    .filter(([, used]) => used.bytesInOutput > 0)
    .map(([path]) => path.match(/node_modules\/((?:@[^/]+\/)?[^/]+)/)?.[1]).filter(Boolean));
  for (const name of [...names].sort()) {
    const folder = "node_modules/" + name;
    const file = fs.readdirSync(folder).find((f) => /^licen[cs]e/i.test(f));
    if (!file) throw new Error("no licence text in " + name);
    const version = JSON.parse(fs.readFileSync(folder + "/package.json")).version;
    console.log("=".repeat(70) + "\n" + name + " " + version + "\n\n" + fs.readFileSync(folder + "/" + file, "utf8"));
  }' > LICENSES.txt
cd - > /dev/null
mkdir -p "$target"
cp "$work/libraries.min.js" "$work/LICENSES.txt" "$target"
