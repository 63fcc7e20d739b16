"use strict";
/* The episode viewer: draws the JSON island "episodes" (made by episodes.py) into #viewer.

   Text reaches the page through text nodes only (`make` appends strings, nothing is parsed as markup), so no
   document or reply can become part of the page. The state is one pair, (episode, turn); `show` draws it.
   Keys: left/right a turn, Home/End first/last turn, k/j an episode, c control tokens. */

const SVG = "http://www.w3.org/2000/svg";

/* ---- elements ---------------------------------------------------------------------------------- */

function make(tag, css, ...children) {
  const element = document.createElement(tag);
  if (css) element.className = css;
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

function draw(tag, attributes, ...children) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

const number = (value) => (value === null || value === undefined ? "–" : value.toLocaleString("en-US"));
const plural = (count, noun) => `${number(count)} ${noun}${count === 1 ? "" : "s"}`;
const dashes = (ids) => ids.replaceAll("-", "–");

/* A text is a string, or [plain, control, plain, control, ...]. A tool result's first line is its header. */
function appendText(parent, text, hasHeader = false) {
  const [first, ...rest] = Array.isArray(text) ? text : [text];
  const end = hasHeader ? (first + "\n").indexOf("\n") : 0;
  if (end) parent.append(make("span", "result-header", first.slice(0, end)));
  parent.append(first.slice(end));
  rest.forEach((run, i) => parent.append(i % 2 ? run : make("span", "control", run)));
  return parent;
}

/* Long texts start folded, so that one loaded document does not bury the rest. */
function textBox(box) {
  const length = box.textContent.length;
  if (length <= 2400) return box;
  const button = make("button", "more", `show all ${number(length)} characters`);
  box.classList.add("folded");
  button.onclick = () => { box.classList.remove("folded"); button.remove(); };
  return make("div", "", box, button);
}

const plainBox = (text, hasHeader) => textBox(appendText(make("pre", "text"), text, hasHeader));

/* ---- what the data says ------------------------------------------------------------------------- */

function loadEpisodes() {
  const data = JSON.parse(document.getElementById("episodes").textContent);
  const text = (i) => data.texts[i];
  const blocks = data.blocks.map(([role, kind, label, before, body, after, tokens], index) =>
    ({ index, role, kind, label, before: text(before), body: text(body), after: text(after), tokens }));
  return data.episodes.map((episode) => ({
    ...episode,
    turns: unfoldTurns(episode.turns, blocks, text),
    // Scripts and endpoints have no cache to report on: both numbers are 0 then.
    hasCache: episode.turns.some((turn) => turn.cached + turn.prefilled > 0),
  }));
}

/* Turns come as differences to the turn before: here each gets its whole context and notes again. */
function unfoldTurns(turns, blocks, text) {
  let context = [], notes = [], freed = 0;
  return turns.map((turn) => {
    const previous = context;
    context = context.slice(0, turn.keep).concat(turn.new.map((i) => blocks[i]));
    const before = notes;
    notes = notes.slice(0, turn.notes_keep).concat(turn.notes_new.map(([key, value]) => [text(key), text(value)]));
    const whole = turn.prompt + freed;
    freed += turn.freed;
    return { ...turn, previous, context, notes, notesBefore: before, whole, action: text(turn.action),
             result: text(turn.result), arguments: text(turn.arguments) };
  });
}

/* Old and new context merged in order: [state, block], state "same", "new" or "gone". */
function diff(old, now) {
  const inNow = new Set(now.map((block) => block.index));
  const inOld = new Set(old.map((block) => block.index));
  const rows = [];
  let i = 0, j = 0;
  while (i < old.length || j < now.length) {
    if (i < old.length && j < now.length && old[i].index === now[j].index) { rows.push(["same", now[j]]); i++; j++; }
    else if (i < old.length && !inNow.has(old[i].index)) rows.push(["gone", old[i++]]);
    else if (j < now.length && !inOld.has(now[j].index)) rows.push(["new", now[j++]]);
    else if (j < now.length) rows.push(["same", now[j++]]);
    else i++;
  }
  return rows;
}

/* ---- the list of episodes ----------------------------------------------------------------------- */

const verdict = (episode) =>
  episode.right === null ? ["open", "not scored"] : episode.right ? ["right", "right"] : ["wrong", "wrong"];

function episodeCard(episode, index, select) {
  const [css, word] = verdict(episode);
  const facts = [plural(episode.turns.length, "turn"), `peak ${number(episode.peak)}`];
  if (episode.document !== null) facts.push(`document ${number(episode.document)}`);
  const card = make("button", "card",
    make("span", "card-head", make("span", `mark ${css}`, word), episode.group ? make("span", "tag", episode.group) : null),
    make("span", "card-question", episode.question),
    make("span", "card-answer", make("span", "dim", "answer "), episode.answer ?? "none",
      episode.stop === "finished" ? null : make("span", "tag warn", episode.stop)),
    make("span", "card-facts dim", facts.join(" · ")), make("span", "card-facts dim", episode.id));
  card.onclick = () => select(index);
  return card;
}

function episodeList(episodes, select) {
  const cards = episodes.map((episode, index) => episodeCard(episode, index, select));
  const list = make("div", "cards", ...cards);
  const count = (keep) => episodes.filter(keep).length;
  const filters = [
    ["all", () => true], ["right", (e) => e.right === true], ["wrong", (e) => e.right === false]];
  const buttons = filters.map(([name, keep]) => {
    const button = make("button", "filter", `${name} ${count(keep)}`);
    button.onclick = () => {
      cards.forEach((card, i) => { card.hidden = !keep(episodes[i]); });
      buttons.forEach((other) => other.setAttribute("aria-pressed", String(other === button)));
    };
    return button;
  });
  buttons[0].setAttribute("aria-pressed", "true");
  return { cards, element: make("nav", "episodes", make("div", "filters", ...buttons), list) };
}

/* ---- the saw-tooth ------------------------------------------------------------------------------ */

function sawTooth(episode, seek) {
  const width = 1000, height = 132, top = 8, bottom = 20, turns = episode.turns;
  const most = Math.max(episode.peak, episode.window ?? 0, 1) * 1.04;
  const x = (turn) => (turn / Math.max(turns.length, 1)) * width;
  const y = (tokens) => top + (1 - Math.min(tokens / most, 1.2)) * (height - top - bottom);
  const steps = (value) => turns.map((turn, i) => `${i ? "L" : "M"}${x(i)},${y(value(turn))}H${x(i + 1)}`).join("");
  const area = (value) => `M0,${y(0)}L${steps(value).slice(1)}V${y(0)}Z`;
  const plot = draw("svg", { viewBox: `0 0 ${width} ${height - bottom}`, preserveAspectRatio: "none", class: "plot" },
    draw("path", { d: area((turn) => turn.prompt + turn.reply), class: episode.hasCache ? "area-prefilled" : "area-plain" }),
    draw("path", { d: area((turn) => turn.cached), class: "area-cached" }),
    draw("path", { d: steps((turn) => turn.prompt + turn.reply), class: "line-context" }),
    draw("path", { d: steps((turn) => turn.whole), class: "line-whole" }));
  if (episode.window !== null) {
    plot.append(draw("line", { x1: 0, x2: width, y1: y(episode.window), y2: y(episode.window), class: "line-window" }));
  }
  const cursor = draw("rect", { y: 0, height: height - bottom, class: "cursor" });
  plot.append(cursor);
  const chart = make("div", "chart", plot);
  const place = (event) => {
    const box = plot.getBoundingClientRect();
    seek(Math.floor(((event.clientX - box.left) / box.width) * turns.length));
  };
  plot.onpointerdown = (event) => { plot.setPointerCapture(event.pointerId); place(event); };
  plot.onpointermove = (event) => { if (event.buttons) place(event); };
  const mark = (turn) => {
    const wide = Math.max(x(1), 4);
    cursor.setAttribute("x", x(turn) - (wide - x(1)) / 2);
    cursor.setAttribute("width", wide);
  };
  return { element: make("figure", "saw", legend(episode), chart), mark };
}

function legend(episode) {
  const item = (css, label) => make("span", "key", make("i", css), label);
  const parts = episode.hasCache
    ? [item("swatch cached", "cached"), item("swatch prefilled", "prefilled and reply")]
    : [item("swatch plain", "prompt and reply")];
  return make("figcaption", "legend", make("b", "", "Context tokens per turn"), ...parts,
    item("swatch whole", "if nothing were deleted"),
    episode.window === null ? null : item("swatch window", `window ${number(episode.window)}`));
}

/* ---- one turn ----------------------------------------------------------------------------------- */

function budget(episode, turn) {
  const window = episode.window ?? Math.max(episode.peak, 1);
  const part = (css, tokens, label) => {
    const bar = make("span", `part ${css}`);
    bar.style.width = `${Math.min((100 * tokens) / window, 100)}%`;
    bar.title = `${label}: ${number(tokens)} tokens`;
    return bar;
  };
  const fact = (css, value, label) => make("span", "fact", css ? make("i", `swatch ${css}`) : null,
    make("b", "", number(value)), ` ${label}`);
  const bars = episode.hasCache
    ? [part("cached", turn.cached, "cached"), part("prefilled", turn.prefilled, "prefilled")]
    : [part("plain", turn.prompt, "prompt")];
  const sum = episode.hasCache ? [fact("cached", turn.cached, "cached +"), fact("prefilled", turn.prefilled, "prefilled")] : [];
  return make("section", "budget", make("div", "bar", ...bars, part("reply", turn.reply, "reply")),
    make("div", "facts", fact("", turn.prompt, episode.hasCache ? "prompt tokens =" : "prompt tokens"), ...sum,
      fact("reply", turn.reply, "reply"), fact("free", turn.left, "left after the turn"),
      episode.window === null ? null : fact("window", episode.window, "window"),
      fact("whole", turn.whole, "if nothing were deleted")));
}

const roleNames = { header: "assistant", stub: "deleted", error: "tool error" };

function blockBox(block, state, cached) {
  const head = make("header", "", make("span", "role", roleNames[block.kind] ?? block.role),
    block.label ? make("span", "id", `#${dashes(block.label)}`) : null,
    block.kind === "stub" ? make("span", "tag warn", "stub") : null,
    state === "new" ? make("span", "tag fresh", "new") : null,
    make("span", "size", plural(block.tokens, "token")));
  const box = make("article", `block role-${block.role} kind-${block.kind} ${state}`, head);
  if (cached !== null) {
    const gauge = make("span", "gauge");
    gauge.style.setProperty("--share", `${Math.round(100 * cached)}%`);
    gauge.title = cached >= 1 ? "from the cache" : cached <= 0 ? "prefilled this turn" : "partly from the cache";
    box.append(gauge);
  }
  const wrapper = (text) => appendText(make("span", "wrapper"), text);
  const text = make("pre", "text", wrapper(block.before));
  if (block.kind === "header") {
    box.append(text, make("p", "dim", "the model continues here"));
    return box;
  }
  appendText(text, block.body, block.role === "tool").append(wrapper(block.after));
  box.append(textBox(text));
  return box;
}

let goneOpen = false; // stays as it was while a person steps through the turns

function goneBox(blocks, turn) {
  const tokens = blocks.reduce((sum, block) => sum + block.tokens, 0);
  const label = `${plural(blocks.length, "message")} gone since turn ${turn - 1} · ${plural(tokens, "token")}`;
  const details = make("details", "gone", make("summary", "", label));
  details.open = goneOpen;
  details.addEventListener("toggle", () => {
    goneOpen = details.open;
    if (details.open && details.childElementCount === 1) {
      details.append(...blocks.map((block) => blockBox(block, "removed", null)));
    }
  });
  return details;
}

function contextColumn(episode, turn) {
  const boxes = [], position = episode.turns.indexOf(turn) + 1;
  let gone = [], at = 0;
  const flush = () => { if (gone.length) boxes.push(goneBox(gone, position)); gone = []; };
  const old = turn.previous.filter((block) => block.kind !== "header");
  for (const [state, block] of diff(old, turn.context)) {
    if (state === "gone") { gone.push(block); continue; }
    flush();
    const cached = Math.min(Math.max((turn.cached - at) / Math.max(block.tokens, 1), 0), 1);
    at += block.tokens;
    const shown = position > 1 && block.kind !== "header" ? state : "same";
    boxes.push(blockBox(block, shown, episode.hasCache ? cached : null));
  }
  flush();
  return make("section", "context", make("h3", "", "Context as the model saw it",
    make("span", "dim", ` ${plural(turn.context.length - 1, "message")}`)), ...boxes);
}

function panel(title, css, ...children) {
  return make("section", `panel ${css}`, make("h3", "", title), ...children);
}

function changes(last) {
  if (!last) return panel("Since the last turn", "", make("p", "dim", "This is the first turn."));
  const rows = [];
  if (last.deleted) {
    rows.push(make("p", "removed-line", "deleted ", make("b", "", `#${dashes(last.deleted)}`),
      ` · ${plural(last.freed, "token")} freed`));
  }
  if (!rows.length) rows.push(make("p", "dim", "Nothing was deleted or collapsed; messages were appended."));
  return panel("Since the last turn", "", ...rows);
}

function notesPanel(turn) {
  const before = new Map(turn.notesBefore);
  const now = new Set(turn.notes.map(([key]) => key));
  const row = ([key, summary]) => {
    const state = !before.has(key) ? "fresh" : before.get(key) !== summary ? "changed" : "";
    return make("tr", state, make("th", "", key), make("td", "", summary),
      make("td", "state", { fresh: "new", changed: "changed" }[state] ?? ""));
  };
  const lost = turn.notesBefore.filter(([key]) => !now.has(key))
    .map(([key, summary]) => make("tr", "lost", make("th", "", key), make("td", "", summary),
      make("td", "state", "removed")));
  const rows = [...turn.notes.map(row), ...lost];
  return panel(`Notes after the turn (${turn.notes.length})`, "notes",
    rows.length ? make("table", "", make("tbody", "", ...rows)) : make("p", "dim", "none"));
}

function sideColumn(episode, turn, last, isFinal) {
  const call = turn.tool === null ? "no runnable call" : turn.tool;
  const action = panel("The model answers", "action", make("p", "call", make("b", "", call),
    turn.tool === null ? null : make("code", "", ` ${turn.arguments}`), turn.cut ? make("span", "tag warn", "cut") : null),
    plainBox(turn.action));
  const result = panel(turn.error ? "The environment refuses" : "The environment returns",
    turn.error ? "result error" : "result", plainBox(turn.result, true));
  const deleted = turn.deleted ? make("p", "removed-line", "this turn deletes ", make("b", "", `#${dashes(turn.deleted)}`),
    ` · ${plural(turn.freed, "token")} freed`) : null;
  if (deleted) result.append(deleted);
  const [css, word] = verdict(episode);
  const end = isFinal ? panel("End of the episode", `end ${css}`, make("p", "", make("span", `mark ${css}`, word),
    ` stop: ${episode.stop} · answer: `, make("b", "", episode.answer ?? "none"), " · expected: ",
    make("b", "", episode.answers.join(" | ") || "not in the document"))) : null;
  return make("aside", "side", action, result, end, changes(last), notesPanel(turn));
}

/* ---- the whole ---------------------------------------------------------------------------------- */

function question(episode) {
  const [css, word] = verdict(episode);
  const term = (name, value) => make("span", "fact", make("span", "dim", `${name} `), make("b", "", value));
  return make("header", "question", make("h2", "", episode.question || "(no question)"),
    make("div", "facts", make("span", `mark ${css}`, word), term("answer", episode.answer ?? "none"),
      term("expected", episode.answers.join(" | ") || "not in the document"), term("stop", episode.stop),
      term("peak context", number(episode.peak)), term("document", number(episode.document)), term("task", episode.id)));
}

function controls(state, seek) {
  const button = (label, title, target) => {
    const element = make("button", "step", label);
    element.title = title;
    element.setAttribute("aria-label", title);
    element.onclick = () => seek(target());
    return element;
  };
  const last = () => state.episodes[state.episode].turns.length - 1;
  const slider = make("input", "slider");
  Object.assign(slider, { type: "range", min: 1, max: Math.max(last() + 1, 1), value: 1 });
  slider.setAttribute("aria-label", "turn");
  slider.oninput = () => seek(slider.valueAsNumber - 1);
  const label = make("output", "where");
  const box = make("input", "");
  Object.assign(box, { type: "checkbox", checked: state.marks, id: "marks" });
  box.onchange = () => setMarks(state, box.checked);
  const toggle = make("label", "toggle", box, " control tokens");
  const element = make("div", "controls", button("«", "first turn (Home)", () => 0),
    button("‹", "previous turn (left arrow)", () => state.turn - 1), label,
    button("›", "next turn (right arrow)", () => state.turn + 1), button("»", "last turn (End)", last), slider, toggle);
  const update = () => {
    label.textContent = `turn ${state.turn + 1} of ${last() + 1}`;
    slider.value = state.turn + 1;
  };
  return { element, update };
}

function setMarks(state, on) {
  state.marks = on;
  document.getElementById("viewer").classList.toggle("hide-wrappers", !on);
  const box = document.getElementById("marks");
  if (box) box.checked = on;
}

/* The viewer may be one part of a longer page, which keeps its keys and its place until the viewer is reached. */
const isAway = (root) => root.getBoundingClientRect().top > innerHeight / 2;

/* Scroll the list, and only the list: scrollIntoView would move the whole page. */
function reveal(list, card) {
  const frame = list.getBoundingClientRect(), box = card.getBoundingClientRect();
  if (box.top < frame.top) list.scrollTop += box.top - frame.top - 8;
  if (box.bottom > frame.bottom) list.scrollTop += box.bottom - frame.bottom + 8;
}

/* The address names the turn that is shown. Some previews forbid that; the viewer works without. */
function remember(hash) {
  try { history.replaceState(null, "", hash); } catch { /* nothing is lost */ }
}

function startViewer(root) {
  const state = { episodes: loadEpisodes(), episode: -1, turn: 0, marks: false };
  if (!state.episodes.length) { root.append(make("p", "dim", "No episodes.")); return; }
  const list = episodeList(state.episodes, (index) => select(index, 0));
  const top = make("div", "top"), body = make("div", "columns");
  root.append(list.element, make("div", "stage", top, body));
  let chart, steps, started = false; // a page that was just opened keeps the address it was opened with

  function select(index, turn) {
    state.episode = Math.min(Math.max(index, 0), state.episodes.length - 1);
    const episode = state.episodes[state.episode];
    list.cards.forEach((card, i) => card.setAttribute("aria-current", String(i === state.episode)));
    reveal(list.element, list.cards[state.episode]);
    chart = sawTooth(episode, seek);
    steps = controls(state, seek);
    top.replaceChildren(question(episode), chart.element, steps.element);
    seek(turn);
  }

  function seek(turn) {
    const episode = state.episodes[state.episode];
    const count = episode.turns.length;
    state.turn = Math.min(Math.max(turn, 0), Math.max(count - 1, 0));
    if (!count) { body.replaceChildren(make("p", "dim", `No turns: the episode ended with ${episode.stop}.`)); return; }
    const now = episode.turns[state.turn];
    chart.mark(state.turn);
    steps.update();
    body.replaceChildren(budget(episode, now), contextColumn(episode, now),
      sideColumn(episode, now, episode.turns[state.turn - 1], state.turn === count - 1));
    if (started) remember(`#episode=${state.episode + 1}&turn=${state.turn + 1}`);
  }

  addEventListener("keydown", (event) => {
    const typing = event.target.matches?.("input:not([type=range]):not([type=checkbox]), textarea, select");
    if (typing || isAway(root) || event.ctrlKey || event.metaKey || event.altKey) return;
    const last = state.episodes[state.episode].turns.length - 1;
    const move = {
      ArrowLeft: () => seek(state.turn - 1), ArrowRight: () => seek(state.turn + 1),
      Home: () => seek(0), End: () => seek(last),
      k: () => select(state.episode - 1, 0), j: () => select(state.episode + 1, 0),
      c: () => setMarks(state, !state.marks),
    }[event.key];
    if (!move) return;
    event.preventDefault();
    move();
  });

  setMarks(state, false);
  const place = new URLSearchParams(location.hash.slice(1));
  select((Number(place.get("episode")) || 1) - 1, (Number(place.get("turn")) || 1) - 1);
  started = true;
  if (place.has("episode") && isAway(root)) root.scrollIntoView();
}

function startTheme(button) {
  const dark = () => matchMedia("(prefers-color-scheme: dark)").matches;
  button.onclick = () => {
    const root = document.documentElement;
    const now = root.dataset.theme ?? (dark() ? "dark" : "light");
    root.dataset.theme = now === "dark" ? "light" : "dark";
  };
}

const themeButton = document.getElementById("theme");
if (themeButton) startTheme(themeButton);
const viewerRoot = document.getElementById("viewer");
if (viewerRoot) startViewer(viewerRoot);
