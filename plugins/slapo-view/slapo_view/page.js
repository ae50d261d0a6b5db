"use strict";

// Names and texts come from models: they become text nodes and attributes, never markup.
const data = JSON.parse(document.getElementById("data").textContent);
const page = document.getElementById("page");
const primitives = [...new Set(data.schedules.flatMap((each) => Object.keys(each.primitives)))].sort();
let serial = 0;

function add(parent, name, attributes = {}, ...children) {
  const space = name === "svg" || parent.namespaceURI?.endsWith("svg") ? "http://www.w3.org/2000/svg" : null;
  const made = space ? document.createElementNS(space, name) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (value === undefined || value === null || value === "") continue;
    if (key === "own") made.style.setProperty("--own", `var(--c${value % 10})`);
    else if (key === "on") for (const [event, act] of Object.entries(value)) made.addEventListener(event, act);
    else made.setAttribute(key, value);
  }
  made.append(...children.map(String));
  parent.append(made);
  return made;
}

function bytes(size) {
  let amount = size, unit = "B";
  for (const letter of ["Ki", "Mi", "Gi", "Ti", "Pi"]) {
    if (amount < 1024) break;
    [amount, unit] = [amount / 1024, `${letter}B`];
  }
  return `${unit === "B" ? Math.round(amount) : amount.toFixed(amount < 10 ? 2 : 1)} ${unit}`;
}

function elements(count) {
  for (const [size, unit] of [[1e12, "T"], [1e9, "B"], [1e6, "M"], [1e3, "k"]]) {
    if (count >= size) return `${(count / size).toFixed(count < 10 * size ? 2 : 1)} ${unit}`;
  }
  return String(count);
}

function stepsBelow(value, found = new Map()) {
  for (const child of value.children ?? []) {
    for (const step of child.steps ?? []) found.set(step.name, (found.get(step.name) ?? 0) + (child.count ?? 1));
    stepsBelow(child, found);
  }
  return found;
}

const counted = (steps) => [...steps].map(([name, count]) => `${name} × ${count}`).join(", ");
const hue = (name) => primitives.indexOf(name);
const shape = (sizes) => (sizes ? (sizes.length ? sizes.join(" × ") : "scalar") : "–");

function table(parent, heads, rows) {
  const made = add(add(parent, "div", { class: "scroll" }), "table");
  const head = add(add(made, "thead"), "tr");
  for (const [title, kind] of heads) add(head, "th", { class: kind, scope: "col" }, title);
  const body = add(made, "tbody");
  for (const row of rows) {
    const line = add(body, "tr");
    row.forEach((text, column) => add(line, "td", { class: heads[column][1] }, text));
  }
}

// -- the tree ---------------------------------------------------------------------------------------------------------

class Tree {
  constructor(parent, schedule, show) {
    this.show = show;
    this.list = add(parent, "div", { class: "tree card", role: "tree", "aria-label": `Modules of ${schedule.title}` });
    this.rows = [];
    this.visit(schedule.tree, null, 1, 1, 1, "");
    const depth = this.rows.length > 60 ? 3 : 9;
    for (const row of this.rows) row.open = row.children.length > 0 && row.level <= depth;
    this.list.addEventListener("keydown", (event) => this.key(event));
    this.update();
    this.focused = this.rows[0];
    this.focused.line.tabIndex = 0;
    this.choose(this.rows[0]);
  }

  visit(value, parent, level, position, size, above) {
    const row = { value, parent, level, children: [], open: false };
    const numbered = value.count && /^\d/.test(value.name);
    const name = numbered ? `${above && `${above}.`}${value.name} × ${value.count}` : value.name || value.type;
    row.title = value.path || value.type;
    const first = value.steps?.[0];
    row.line = add(this.list, "div", {
      class: "row", role: "treeitem", tabindex: -1, "aria-level": level, "aria-posinset": position,
      "aria-setsize": size, "aria-selected": false, own: first && hue(first.name), title: row.title,
      on: { click: (event) => this.click(row, event) },
    });
    row.line.style.paddingLeft = `${(level - 1) * 0.9}rem`;
    row.turn = add(row.line, "span", { class: "turn", "aria-hidden": true });
    add(row.line, "span", { class: "name" }, name);
    add(row.line, "span", { class: "type" }, value.alias ? `same module as ${value.alias}` : value.name ? value.type : "");
    const chips = add(row.line, "span", { class: "chips" });
    for (const own of new Set((value.steps ?? []).map((step) => step.name))) {
      const same = value.steps.filter((step) => step.name === own);
      const times = same.length > 1 ? ` × ${same.length}` : "";
      const calls = same.map((step) => step.call).join("\n");
      add(chips, "span", { class: "chip", own: hue(own), title: calls }, own.split(".").pop() + times);
    }
    if (value.steps?.some((step) => step.missing)) add(chips, "span", { class: "tag bad" }, "missing");
    const under = stepsBelow(value);
    if (under.size) {
      const dots = add(row.line, "span", { class: "dots", title: `below: ${counted(under)}` });
      for (const below of under.keys()) add(dots, "span", { class: "swatch", own: hue(below) });
    }
    if (value.differs) add(row.line, "span", { class: "tag" }, "differs");
    if (value.bytes) add(row.line, "span", { class: "size" }, bytes(value.bytes));
    this.rows.push(row);
    const below = value.children ?? [];
    below.forEach((child, at) =>
      row.children.push(this.visit(child, row, level + 1, at + 1, below.length, value.name)));
    return row;
  }

  update() {
    for (const row of this.rows) {
      row.line.hidden = row.parent !== null && (row.parent.line.hidden || !row.parent.open);
      row.line.style.display = row.line.hidden ? "none" : "";
      if (!row.children.length) continue;
      row.line.setAttribute("aria-expanded", row.open);
      row.turn.textContent = row.open ? "▾" : "▸";
    }
  }

  click(row, event) {
    if (event.target === row.turn && row.children.length) this.turn(row, !row.open);
    else this.choose(row);
    this.focus(row);
  }

  turn(row, open) {
    row.open = open;
    this.update();
  }

  choose(row) {
    for (const each of this.rows) each.line.setAttribute("aria-selected", each === row);
    this.show(row);
  }

  focus(row) {
    this.focused.line.tabIndex = -1;
    this.focused = row;
    row.line.tabIndex = 0;
    row.line.focus({ preventScroll: true });
    row.line.scrollIntoView({ block: "nearest" });
  }

  key(event) {
    const row = this.focused, seen = this.rows.filter((each) => !each.line.hidden), at = seen.indexOf(row);
    const acts = {
      ArrowDown: () => this.focus(seen[Math.min(at + 1, seen.length - 1)]),
      ArrowUp: () => this.focus(seen[Math.max(at - 1, 0)]),
      Home: () => this.focus(seen[0]),
      End: () => this.focus(seen[seen.length - 1]),
      ArrowRight: () => (row.open ? this.focus(row.children[0]) : row.children.length && this.turn(row, true)),
      ArrowLeft: () => (row.open ? this.turn(row, false) : row.parent && this.focus(row.parent)),
      Enter: () => this.choose(row),
      " ": () => this.choose(row),
    };
    if (!acts[event.key] || event.ctrlKey || event.altKey || event.metaKey) return;
    event.preventDefault();
    acts[event.key]();
  }

  emphasize(name) {
    for (const row of this.rows) {
      const has = (value) => value.steps?.some((step) => step.name === name) || value.children?.some(has);
      row.line.classList.toggle("dim", name !== null && !has(row.value));
    }
  }
}

// -- one module -------------------------------------------------------------------------------------------------------

function showModule(panel, row) {
  const value = row.value;
  panel.replaceChildren();
  add(panel, "h3", { class: "mono" }, value.path || value.type);
  const facts = [value.path ? value.type : "the model"];
  if (value.count) facts.push(`${value.count} equal modules`);
  if (value.stages) facts.push(`stage${value.stages.length > 1 ? "s" : ""} ${value.stages.join(", ")}`);
  if (value.elements) facts.push(`${value.elements.toLocaleString("en")} parameters, ${bytes(value.bytes ?? 0)} on a rank`);
  if (value.differs) facts.push(value.count ? `${value.differs} of ${value.count} differ from the other schedule` : "differs from the other schedule");
  add(panel, "p", { class: "faint" }, facts.join(" · "));
  if (value.alias) add(panel, "p", {}, `The same module as ${value.alias}.`);
  if (value.tensors) {
    add(panel, "h4", {}, "Tensors");
    table(panel, [["name", "mono"], ["before"], ["on a rank"], ["layout"], ["type"], ["bytes", "number"]],
      value.tensors.map((each) => [
        each.name, shape(each.before), shape(each.after), each.tied_to ? `tied to ${each.tied_to}` : each.layout ?? "",
        each.dtype, each.bytes ? bytes(each.bytes) : "",
      ]));
  }
  if (value.steps) add(panel, "h4", {}, "Steps");
  for (const step of value.steps ?? []) showStep(panel, step);
  if (value.collectives) {
    add(panel, "h4", {}, value.count ? `Collectives of a training step, of all ${value.count}` : "Collectives of a training step");
    table(panel, [["collective"], ["in"], ["step", "mono"], ["times", "number"], ["bytes", "number"], ["by"]],
      value.collectives.map((each) => [
        `${each.kind} over ${each.mesh_dim || "other ranks"}`, each.phase, each.step, each.count, bytes(each.bytes),
        each.source,
      ]));
  }
  if (value.graph) {
    add(panel, "h4", {}, "Graph");
    add(panel, "pre", { tabindex: 0, "aria-label": "Graph" }, value.graph);
  }
  if (!value.steps && !value.tensors && !value.collectives && !value.graph && !value.alias) {
    add(panel, "p", {}, "No step, and no tensors of its own.");
  }
  const under = stepsBelow(value);
  if (under.size) add(panel, "p", { class: "faint" }, `Steps below: ${counted(under)}`);
}

function showStep(panel, step) {
  const box = add(panel, "div", { class: "step", own: hue(step.name) });
  add(box, "div", { class: "mono" }, `#${step.numbers} ${step.call}`);
  add(box, "div", { class: "faint" }, [step.name, step.plugin, step.at].filter(Boolean).join(" · "));
  if (step.line) add(box, "pre", {}, step.line);
  const list = add(box, "ul");
  for (const edit of step.edits ?? []) add(list, "li", {}, edit);
  for (const effect of step.effects ?? []) add(list, "li", {}, `expected: ${effect}`);
  if (step.seen) {
    const [seen, all] = step.seen;
    add(list, "li", { class: seen === all ? "good" : "bad" }, `receipt: ${seen} of ${all} effects seen`);
  }
  for (const text of step.missing ?? []) add(list, "li", { class: "bad" }, `missing: ${text}`);
}

// -- stages, time and memory ------------------------------------------------------------------------------------------

function showStages(section, found) {
  add(section, "h2", {}, "Stages");
  const line = add(section, "div", { class: "stages", tabindex: 0, role: "group", "aria-label": "Stages" });
  const detail = add(section, "div", { id: `crossing${serial++}` });
  const buttons = [];
  for (const stage of found.stages) {
    const box = add(line, "div", { class: "stage card" });
    add(box, "h3", {}, `stage ${stage.index}`);
    add(box, "p", { class: "mono" }, stage.first === stage.last ? stage.first : `${stage.first} … ${stage.last}`);
    const facts = [`${elements(stage.parameters)} parameters`, `${bytes(stage.bytes)} on a rank`];
    if (stage.flops) facts.push(`${elements(stage.flops)}FLOP forward`);
    if (stage.inputs.length) facts.push(`reads ${stage.inputs.join(", ")}`);
    if (stage.tied.length) facts.push(`tied: ${stage.tied.join(", ")}`);
    for (const fact of facts) add(box, "p", { class: "faint" }, fact);
    if (!stage.sent.length) continue;
    const button = add(line, "button", {
      class: "crossing", "aria-expanded": false, "aria-controls": detail.id,
      "aria-label": `Values from stage ${stage.index} to ${stage.index + 1}, ${bytes(stage.bytes_sent)}`,
    }, `→ ${bytes(stage.bytes_sent)}`);
    buttons.push(button);
    button.addEventListener("click", () => {
      const open = button.getAttribute("aria-expanded") !== "true";
      for (const each of buttons) each.setAttribute("aria-expanded", open && each === button);
      detail.replaceChildren();
      if (!open) return;
      add(detail, "h4", {}, `From stage ${stage.index} to stage ${stage.index + 1}, for the batch`);
      table(detail, [["value", "mono"], ["shape"], ["type"], ["bytes", "number"], ["for stages"], ["gradient"]],
        stage.sent.map((each) => [
          each.name, shape(each.shape), each.dtype, bytes(each.nbytes), each.consumers.join(", ") || "the output",
          each.requires_grad ? "comes back" : "none",
        ]));
    });
  }
  const outputs = Object.entries(found.outputs).map(([name, stage]) => `${name} (stage ${stage})`);
  add(section, "p", { class: "faint" }, `output: ${outputs.join(", ")}`);
}

const WORK = { F: ["forward", 0], B: ["backward", 1], I: ["backward, inputs", 1], W: ["backward, weights", 2] };

function showTimeline(section, found) {
  const wide = data.schedules.length === 1;
  add(section, "h2", {}, "Pipeline ranks over time");
  const percent = (100 * found.bubble).toFixed(1);
  const text = `${found.schedule}, ${found.microbatches} micro-batches: ranks wait ${percent} % of a step`;
  add(section, "p", {}, `${text}, if all stages take the same time.`);
  const kinds = Object.keys(WORK).filter((kind) => found.actions.some((each) => each[1] === kind));
  const legend = add(section, "div", { class: "legend" });
  for (const kind of kinds) {
    const item = add(legend, "span");
    add(item, "span", { class: "swatch", own: WORK[kind][1] });
    add(item, "span", {}, WORK[kind][0]);
  }
  const unit = Math.max(9, Math.min(48, (wide ? 1020 : 500) / found.length)), height = 26, left = 52;
  const frame = add(section, "div", { class: "scroll card", tabindex: 0, role: "group", "aria-label": "Timeline" });
  const width = left + found.length * unit + 8;
  const svg = add(frame, "svg", { width, height: found.ranks * height + 8, role: "img", "aria-label": text });
  for (let rank = 0; rank < found.ranks; rank++) {
    add(svg, "text", { x: 6, y: rank * height + 21 }, `rank ${rank}`);
  }
  for (const [rank, kind, stage, batch, start, end] of found.actions) {
    const x = left + start * unit, length = (end - start) * unit;
    const bar = add(svg, "rect", {
      class: "work", own: WORK[kind][1], x, y: rank * height + 5, width: length, height: height - 4, rx: 2,
    });
    add(bar, "title", {}, `rank ${rank}, stage ${stage}: ${WORK[kind][0]} of micro-batch ${batch}`);
    if (length > 13) add(svg, "text", { x: x + length / 2, y: rank * height + 21 }, batch);
  }
}

function showMemory(section, found) {
  add(section, "h2", {}, "Memory over a training step, estimated");
  const choice = add(section, "div", { class: "legend", role: "group", "aria-label": "Kinds of ranks" });
  const chart = add(section, "div");
  const buttons = found.kinds.map((kind) => {
    const label = kind.ranks.length > 1 ? `rank ${kind.rank} and ${kind.ranks.length - 1} more` : `rank ${kind.rank}`;
    return add(choice, "button", { "aria-pressed": false, on: { click: () => choose(kind) } }, label);
  });
  function choose(kind) {
    buttons.forEach((button, at) => button.setAttribute("aria-pressed", found.kinds[at] === kind));
    chart.replaceChildren();
    drawMemory(chart, kind, found.names);
  }
  choose(found.kinds.reduce((most, each) => (each.peak.total > most.peak.total ? each : most)));
  if (found.kinds.length === 1) choice.remove();
  const more = add(section, "details", { "aria-label": "Assumptions" });
  add(more, "summary", {}, "Assumptions");
  const list = add(more, "ul", { class: "notes" });
  for (const text of found.assumptions) add(list, "li", {}, text);
}

const PHASES = { forward: 7, recomputation: 2, backward: 1, optimizer: 8 };

function drawMemory(parent, kind, names) {
  const peak = kind.peak;
  const where = peak.module && peak.module !== peak.phase ? `in ${peak.module}, ${peak.phase}` : peak.phase;
  const text = `${bytes(peak.total)} at the peak, ${where}`;
  add(parent, "p", {}, `${text}; ${kind.operations.toLocaleString("en")} operations, from left to right.`);
  const legend = add(parent, "div", { class: "legend" });
  names.forEach((name, at) => {
    if (!kind.samples.some((sample) => sample[at])) return;
    const item = add(legend, "span");
    add(item, "span", { class: "swatch", own: at });
    add(item, "span", {}, `${name} ${bytes(peak[name])}`);
  });
  const width = 1000, height = 260, count = kind.samples.length;
  const totals = kind.samples.map((sample) => sample.reduce((sum, size) => sum + size, 0));
  const most = Math.max(...totals, 1), x = (at) => (count > 1 ? (at / (count - 1)) * width : 0);
  const y = (size) => height - (size / most) * (height - 10);
  const svg = add(add(parent, "div", { class: "card" }), "svg", {
    viewBox: `0 0 ${width} ${height}`, width: "100%", height, preserveAspectRatio: "none", role: "img",
    "aria-label": text,
  });
  let below = kind.samples.map(() => 0);
  names.forEach((name, part) => {
    const above = below.map((size, at) => size + kind.samples[at][part]);
    const upper = above.map((size, at) => `${x(at).toFixed(1)},${y(size).toFixed(1)}`);
    const lower = below.map((size, at) => `${x(at).toFixed(1)},${y(size).toFixed(1)}`).reverse();
    add(svg, "polygon", { class: "part", own: part, points: [...upper, ...lower].join(" ") });
    below = above;
  });
  const phases = [...new Set(kind.places.map((place) => place[0]))];
  const strip = add(svg.parentElement, "svg", {
    viewBox: `0 0 ${width} 8`, width: "100%", height: 8, preserveAspectRatio: "none", "aria-hidden": true,
  });
  kind.places.forEach(([phase], at) => {
    const place = { x: (at / count) * width, y: 0, width: width / count + 0.5, height: 8 };
    add(strip, "rect", { class: "phase", own: PHASES[phase] ?? 9, ...place });
  });
  const names_of_phases = add(parent, "div", { class: "legend" });
  for (const phase of phases) {
    const item = add(names_of_phases, "span");
    add(item, "span", { class: "swatch", own: PHASES[phase] ?? 9 });
    add(item, "span", {}, phase);
  }
  const mark = add(svg, "line", { class: "mark", y1: 0, y2: height, x1: -9, x2: -9, "vector-effect": "non-scaling-stroke" });
  const slider = add(parent, "input", {
    type: "range", min: 0, max: count - 1, value: totals.indexOf(most), "aria-label": "Position in the step",
  });
  const said = add(parent, "p", { class: "faint", role: "status" });
  function look(at) {
    const place = kind.places[at];
    mark.setAttribute("x1", x(at));
    mark.setAttribute("x2", x(at));
    const module = place[1] && place[1] !== place[0] ? ` of ${place[1]}` : "";
    said.textContent = `${bytes(totals[at])} in the ${place[0]}${module}`;
    slider.value = at;
    slider.setAttribute("aria-valuetext", said.textContent);
  }
  look(Math.max(0, totals.indexOf(most)));
  slider.addEventListener("input", () => look(Number(slider.value)));
  svg.addEventListener("pointermove", (event) => {
    const box = svg.getBoundingClientRect();
    look(Math.max(0, Math.min(count - 1, Math.round(((event.clientX - box.left) / box.width) * (count - 1)))));
  });
}

// -- the page ---------------------------------------------------------------------------------------------------------

function showSchedule(parent, schedule) {
  const section = add(parent, "section", { "aria-label": schedule.title });
  add(section, "h1", {}, schedule.title);
  const mesh = Object.entries(schedule.mesh).map(([name, size]) => `${name} ${size}`).join(" × ") || "one rank";
  const facts = [["model", schedule.model], ["mesh", mesh], ["steps", schedule.steps],
    ["parameters", elements(schedule.parameters)]];
  if (schedule.stages) {
    facts.push(["parameters of the largest stage, on a rank", bytes(Math.max(...schedule.stages.stages.map((one) => one.bytes)))]);
  } else facts.push([`parameters on a rank${schedule.mesh.pp > 1 ? ", all stages" : ""}`, bytes(schedule.bytes)]);
  if (schedule.timeline) facts.push(["bubble", `${(100 * schedule.timeline.bubble).toFixed(1)} %`]);
  if (schedule.memory) facts.push(["peak memory, estimated", bytes(Math.max(...schedule.memory.kinds.map((one) => one.peak.total)))]);
  if (schedule.receipt) facts.push(["effects seen", `${schedule.receipt.seen} of ${schedule.receipt.all}`]);
  const list = add(section, "dl", { class: "facts" });
  for (const [name, value] of facts) {
    const one = add(list, "div");
    add(one, "dt", {}, name);
    add(one, "dd", {}, value);
  }
  let tree = null, emphasized = null;
  const legend = add(section, "div", { class: "legend", role: "group", "aria-label": "Steps" });
  const buttons = Object.entries(schedule.primitives).sort().map(([name, count]) => {
    const button = add(legend, "button", { "aria-pressed": false });
    add(button, "span", { class: "swatch", own: hue(name) });
    add(button, "span", {}, `${name} × ${count}`);
    button.addEventListener("click", () => {
      emphasized = emphasized === name ? null : name;
      tree.emphasize(emphasized);
      for (const each of buttons) each.setAttribute("aria-pressed", each === button && emphasized !== null);
    });
    return button;
  });
  const split = add(section, "div", { class: "split" });
  const left = add(split, "div");
  const panel = add(split, "div", { class: "detail card", role: "region", "aria-label": "Module", "aria-live": "polite" });
  tree = new Tree(left, schedule, (row) => showModule(panel, row));
  if (schedule.stages) showStages(section, schedule.stages);
  if (schedule.timeline) showTimeline(section, schedule.timeline);
  if (schedule.memory) showMemory(section, schedule.memory);
  const others = (schedule.receipt?.others ?? []).map(
    (one) => `receipt: ${one.source || "no step"}: expected ${one.expected}, seen: ${one.seen}`);
  const notes = [...schedule.notes, ...(schedule.stages?.notes ?? []), ...others];
  if (!notes.length) return;
  const made = add(section, "ul", { class: "notes" });
  for (const note of notes) add(made, "li", {}, note);
}

function start() {
  page.replaceChildren();
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const root = document.documentElement;
  const isDark = () => (root.dataset.theme ?? (dark.matches ? "dark" : "light")) === "dark";
  const bar = add(page, "div", { class: "bar" });
  const toggle = add(bar, "button", { on: { click: () => {
    root.dataset.theme = isDark() ? "light" : "dark";
    toggle.textContent = isDark() ? "Light" : "Dark";
  } } }, isDark() ? "Light" : "Dark");
  toggle.setAttribute("aria-label", "Switch between light and dark");
  const columns = add(page, "div", { class: data.schedules.length > 1 ? "schedules two" : "schedules" });
  for (const schedule of data.schedules) showSchedule(columns, schedule);
}

start();
