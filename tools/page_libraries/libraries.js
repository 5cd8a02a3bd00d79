// What the page over variants takes of its libraries; `build.sh` bundles it.
export { plot, dot, ruleX, ruleY, link, line, text, tip, pointer } from "@observablehq/plot";
export { diffWordsWithSpace } from "diff";
