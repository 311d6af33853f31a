// SPDX-License-Identifier: Apache-2.0
// node search.mjs SITE QUERY...: the places that the site's own search finds for each query, as one JSON
// object: a list for each page, the best page first.
//
// What a browser runs as a worker runs here: the theme's script, given the site's index as the page gives it, behind the
// site's own script (docs/search.js).

import fs from "node:fs";
import path from "node:path";
import vm from "node:vm";

const [SETUP, READY, QUERY, RESULT] = [0, 1, 2, 3]; // the worker's messages
const [site, ...queries] = process.argv.slice(2);
const folder = path.join(site, "assets", "javascripts", "workers");
const script = fs.readdirSync(folder).find((name) => /^search\..*\.js$/.test(name));

let heard; // what listens to messages in the worker
let answered; // what waits for the next answer
const worker = {
    addEventListener: (kind, listener) => { if (kind === "message") heard = listener; },
    postMessage: (message) => answered(message),
    console, setTimeout, clearTimeout, TextDecoder, TextEncoder, URL,
};
worker.self = worker.globalThis = worker;
vm.runInNewContext(fs.readFileSync(path.join(folder, script), "utf-8"), worker, { filename: script });

class Worker {
    postMessage(message) {
        heard({ data: message });
    }
}
vm.runInNewContext(fs.readFileSync(path.join(site, "search.js"), "utf-8"), { Worker });

async function ask(type, data, expected) {
    const answer = new Promise((resolve) => { answered = resolve; });
    new Worker().postMessage({ type, data });
    const { type: kind, data: given } = await answer;
    if (kind !== expected) throw new Error(`the worker answered with ${kind} and not with ${expected}`);
    return given;
}

const index = JSON.parse(fs.readFileSync(path.join(site, "search", "search_index.json"), "utf-8"));
await ask(SETUP, { config: index.config, docs: index.docs, options: { suggest: false } }, READY);
const found = {};
for (const query of queries) {
    const { items } = await ask(QUERY, query, RESULT);
    found[query] = items.map((sections) => sections.map((one) => one.location));
}
console.log(JSON.stringify(found));
