// The page: its head, the bar that says what is shown, and one section per question.

const main = document.getElementById("main"), contents = document.getElementById("contents");
const runs = data.runs, groups = data.groups;
const manyObjectives = objectives.length > 8;
const single = !comparing;
const groupOptions = (keep = () => true) => groups.map((g, i) => [i, g.label]).filter(([i]) => keep(i));
const objectiveKeys = (s) => ({ "data-objective": s });
const groupKeys = (g) => ({ "data-run": g });
const redraw = (id) => () => cards.find((card) => card.id === id).render();
const firstRun = (g) => runs[groups[g].runs[0]];
const NONE_SHOWN = "No objective is chosen. Choose some in the bar above.";
const NO_RUN_SHOWN = "No run is chosen. Choose some in the bar above.";

function section(id, title, lead, ...children) {
  contents.append(el("a", { href: `#${id}` }, title));
  main.append(el("section", { id, "aria-labelledby": `${id}-title` }, el("h2", { id: `${id}-title` }, title), lead ? el("p", { class: "lead" }, prose(lead)) : null, children));
}
const stack = (...children) => el("div", { class: "stack" }, children);
const grid = (...children) => el("div", { class: "grid" }, children);
const table = (head, rows, label) => el("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": label },
  el("table", {}, el("thead", {}, el("tr", {}, head.map((h) => el("th", { scope: "col" }, h)))), el("tbody", {}, rows)));
const swatch = (color, pattern) => sv("svg", { class: "line-swatch", width: 22, height: 10, "aria-hidden": "true" },
  sv("line", { x1: 0, x2: 22, y1: 5, y2: 5, stroke: color, "stroke-width": 3, "stroke-dasharray": pattern || null }));

// ---- head ------------------------------------------------------------------------------------

function buildTop() {
  const run = runs[0], portrait = data.portraits[0];
  const parts = single
    ? [run.problem, run.algorithm, groups[0].runs.length > 1 ? many(groups[0].runs.length, "seed") : `seed ${run.seed}`]
    : [run.problem, many(groups.length, "run"), seeds > 1 ? `up to ${many(seeds, "seed")} each` : ""];
  parts.push(many(portrait.size, "client"), many(objectives.length, "objective"));
  const toggle = el("button", { type: "button", id: "theme", onclick: () => {
    shown.theme = theme().name === "dark" ? "light" : "dark";
    applyTheme();
  } });
  document.getElementById("top").append(
    el("div", {}, el("p", { class: "kind" }, "fmol report"), el("h1", {}, data.title), el("p", { class: "sub" }, parts.filter(Boolean).join(" · "))),
    toggle);
}
function applyTheme() {
  const look = theme(), toggle = document.getElementById("theme");
  document.documentElement.dataset.theme = look.name;
  toggle.textContent = look.name === "dark" ? "☀ Light" : "☾ Dark";
  toggle.setAttribute("aria-label", look.name === "dark" ? "Use light colours" : "Use dark colours");
  buildBar();
  fillSwatches();
  renderAll();
}
function fillSwatches() {
  for (const cell of document.querySelectorAll("[data-swatch]")) {
    const [kind, i] = cell.dataset.swatch.split(":");
    const count = kind === "objective" ? objectives.length : groups.length;
    cell.replaceChildren(swatch(colour(Number(i), count, theme()), dash(Number(i), count)));
  }
}
const swatchFor = (kind, i) => el("span", { class: "swatch-cell", "data-swatch": `${kind}:${i}` });

// ---- the bar ---------------------------------------------------------------------------------

let barOpen = false, searched = "";
function chip(kind, i, name, hidden) {
  const count = kind === "objective" ? objectives.length : groups.length;
  const coloured = kind === "run" || single;
  const node = el("button", {
    type: "button", class: "chip", "data-chip": `${kind}:${i}`, "aria-pressed": String(!hidden.has(i)), title: name,
    onclick: () => { if (hidden.has(i)) hidden.delete(i); else hidden.add(i); syncBar(); renderAll(); },
    onpointerenter: () => spotlight(kind, i), onpointerleave: () => spotlight(null),
  }, coloured ? swatch(colour(i, count, theme()), dash(i, count)) : null, el("span", {}, kind === "objective" && manyObjectives ? `${i + 1} ${name}` : name));
  return node;
}
/** Everything but one objective or run steps back. */
function spotlight(kind, i) {
  const name = kind === "objective" ? "data-objective" : "data-run";
  for (const mark of document.querySelectorAll(".stage .mark")) {
    if (kind && mark.hasAttribute(name) && mark.getAttribute(name) !== String(i)) mark.setAttribute("opacity", 0.12);
    else mark.removeAttribute("opacity");
  }
}
function buildBar() {
  const bar = document.getElementById("bar");
  const all = (kind, set, count) => [
    el("button", { type: "button", class: "small", "aria-label": `Show all ${kind}s`, onclick: () => { set.clear(); syncBar(); renderAll(); } }, "all"),
    el("button", { type: "button", class: "small", "aria-label": `Show no ${kind}`, onclick: () => { for (let i = 0; i < count; i++) set.add(i); syncBar(); renderAll(); } }, "none"),
  ];
  const chips = objectives.map((name, s) => chip("objective", s, name, shown.hiddenObjectives));
  const find = el("input", { type: "search", placeholder: "find an objective", "aria-label": "Find an objective", value: searched, oninput: () => {
    searched = find.value;
    const wanted = searched.toLowerCase();
    chips.forEach((c, s) => { c.hidden = !objectives[s].toLowerCase().includes(wanted); });
  } });
  const parts = [];
  if (comparing) parts.push(el("div", { class: "bar-row" }, el("span", { class: "bar-name" }, "Runs"), el("div", { class: "chips" }, groups.map((g, i) => chip("run", i, g.label, shown.hiddenGroups))), el("span", { class: "bar-end" }, all("run", shown.hiddenGroups, groups.length))));
  if (!manyObjectives) {
    parts.push(el("div", { class: "bar-row" }, el("span", { class: "bar-name" }, "Objectives"), el("div", { class: "chips" }, chips), el("span", { class: "bar-end" }, all("objective", shown.hiddenObjectives, objectives.length))));
  } else {
    const panel = el("details", { ontoggle: () => { barOpen = panel.open; } },
      el("summary", {}, el("span", { class: "bar-name" }, "Objectives"), " ", el("span", { id: "how-many" })),
      el("div", { class: "panel" }, el("div", { class: "bar-row" }, find, el("span", { class: "bar-end" }, all("objective", shown.hiddenObjectives, objectives.length))), el("div", { class: "chips" }, chips)));
    panel.open = barOpen;
    parts.push(panel);
  }
  bar.replaceChildren(...parts);
  if (searched && manyObjectives) find.dispatchEvent(new Event("input"));
  syncBar();
}
function syncBar() {
  for (const node of document.querySelectorAll("[data-chip]")) {
    const [kind, i] = node.dataset.chip.split(":");
    node.setAttribute("aria-pressed", String(!(kind === "objective" ? shown.hiddenObjectives : shown.hiddenGroups).has(Number(i))));
  }
  const count = document.getElementById("how-many");
  if (count) count.textContent = `${visibleObjectives().length} of ${objectives.length} shown`;
}

// ---- numbers at the end ----------------------------------------------------------------------

const finals = (g, s, measure) => groups[g].runs.map((r) => tableOf(runs[r], measure)).filter(Boolean).map((t) => last(t[s])).filter(known);
const starts = (g, s, measure) => groups[g].runs.map((r) => tableOf(runs[r], measure)).filter(Boolean).map((t) => first(t[s])).filter(known);
function spreadOf(values) {
  if (!values.length) return "–";
  return values.length > 1 ? `${fmt(mean(values), 3)} ± ${fmt(deviation(values), 2)}` : fmt(values[0]);
}
/** Objective → loss at the end divided by that at the start. */
const falls = (g) => objectives.map((_, s) => {
  const start = starts(g, s, "loss"), end = finals(g, s, "loss");
  return start.length && end.length && mean(start) > 0 ? mean(end) / mean(start) : null;
});

function summary() {
  if (single) {
    const ratios = falls(0).map((v, s) => [v, s]).filter(([v]) => known(v)).sort((a, b) => a[0] - b[0]);
    if (!ratios.length) return "No training loss was measured at both ends of this run.";
    if (runs[0].done === 0) return "No round was run: these are the losses of the untrained model.";
    const fell = ratios.filter(([v]) => v < 1).length, words = ([v, s]) => {
      const change = v <= 1 ? `down ${percent(1 - v)}` : `up ${percent(v - 1)}`;
      return `\`${objectives[s]}\` (${fmt(mean(starts(0, s, "loss")), 3)} → ${fmt(mean(finals(0, s, "loss")), 3)}, ${change})`;
    };
    const all = fell === ratios.length ? (fell === 1 ? "The training loss fell" : fell === 2 ? "The training loss fell for both objectives" : `The training loss fell for all ${fell} objectives`)
      : `The training loss fell for ${fell} of ${ratios.length} objectives`;
    return ratios.length > 1 ? `${all}: most for ${words(ratios[0])}, least for ${words(ratios[ratios.length - 1])}.` : `${all}: ${words(ratios[0])}.`;
  }
  const scores = groups.map((_, g) => [falls(g).filter(known), g]).filter(([v, g]) => v.length && !firstRun(g).alone).map(([v, g]) => [mean(v), Math.max(...v), g]);
  if (!scores.length) return "No training loss was measured in these runs.";
  const best = [...scores].sort((a, b) => a[0] - b[0])[0], worst = [...scores].sort((a, b) => a[1] - b[1])[0];
  const worstOf = Math.max(...scores.map((s) => s[0]));
  if (scores.length > 1 && worstOf <= 1.01 * best[0]) return `All runs end with about the same training loss: on average over objectives ${percent(best[0])} of where they started.`;
  const about = `\`${groups[best[2]].label}\` ends with the lowest training loss on average over objectives, ${percent(best[0])} of where it started`;
  return best[2] === worst[2] ? `${about}; its worst objective is also the best of all runs' worst, at ${percent(worst[1])}.`
    : `${about}; the worst-off objective does best in \`${groups[worst[2]].label}\`, at ${percent(worst[1])}.`;
}

function headline() {
  const portrait = data.portraits[0], tile = (name, value, note) => el("div", { class: "tile" }, el("span", {}, name), el("b", {}, value), note ? el("small", {}, note) : null);
  const done = [...new Set(runs.map((r) => r.done))].sort((a, b) => a - b);
  const tiles = [
    tile("rounds", done.length > 1 ? `${whole(done[0])}–${whole(done[done.length - 1])}` : whole(done[0])),
    tile("clients", whole(portrait.size)),
    tile("objectives", whole(objectives.length)),
    tile("model", portrait.model, `${whole(portrait.parameters)} parameters`),
  ];
  if (single) tiles.push(tile("algorithm", runs[0].algorithm, groups[0].runs.length > 1 ? `seeds ${listed(groups[0].runs.map((r) => String(runs[r].seed)))}` : `seed ${runs[0].seed}`));
  const traffic = mean(runs.map((r) => (last(r.up) || 0) + (last(r.down) || 0)));
  tiles.push(tile("communication", traffic < 0.1 ? `${fmt(1000 * traffic, 3)} kB` : `${fmt(traffic, 3)} MB`, single ? "up and down" : "mean over runs"));

  const words = [];
  const multiple = runs.length > 1;
  const who = (run, r) => (multiple ? [el("b", {}, `${run.name}, seed ${run.seed}`), ": "] : []);
  const stops = new Map();
  runs.forEach((run) => {
    const text = run.finished ? `Ended after ${many(run.done, "round")}: ${run.stopped || "no reason was recorded"}.` : `This run has not ended: ${many(run.done, "round")} so far, and the trained model was not evaluated.`;
    stops.set(text, [...(stops.get(text) || []), run]);
  });
  for (const [text, those] of stops) {
    const kind = those[0].finished ? "quiet" : "warn";
    words.push(el("li", { class: kind }, multiple && stops.size > 1 ? [el("b", {}, those.length > 3 ? `${those.length} of ${runs.length} runs` : listed(those.map((r) => `${r.name}, seed ${r.seed}`))), ": "] : [], prose(text)));
  }
  let alarms = 0;
  runs.forEach((run, r) => {
    for (const alarm of run.alarms) {
      alarms += 1;
      const when = alarm.stands ? `since round ${alarm.since}, until the end` : `rounds ${alarm.since} to ${alarm.until}`;
      words.push(el("li", { class: "alarm" }, who(run, r), el("b", {}, `Alarm, ${alarm.kind}`), ` (${when}): `, prose(alarm.message)));
    }
    if (run.refused.count) {
      words.push(el("li", { class: "warn" }, who(run, r), el("b", {}, `${many(run.refused.count, "refusal")}. `), el("details", {}, el("summary", {}, "What and why"), el("ul", {}, run.refused.first.map((text) => el("li", {}, prose(text)))), run.refused.count > run.refused.first.length ? `… ${run.refused.count - run.refused.first.length} more` : "")));
    }
    for (const fact of [...run.facts, ...run.notes]) words.push(el("li", { class: "note" }, who(run, r), prose(fact)));
  });
  if (!alarms) words.push(el("li", { class: "quiet" }, "No alarm stood at any time."));

  section("overview", "At a glance", summary(), el("div", { class: "tiles" }, tiles), el("ul", { class: "words" }, words), single ? finalTable() : compareTable());
}

function finalTable() {
  const targets = data.portraits[0].targets, aimed = Object.keys(targets).length > 0;
  const head = ["objective", "loss at the start", "loss at the end", "change", ...measures.slice(1).map(measureName), "mean weight λ", ...(aimed ? ["target"] : [])];
  const rows = objectives.map((name, s) => {
    const start = starts(0, s, "loss"), end = finals(0, s, "loss");
    const change = start.length && end.length && mean(start) > 0 ? mean(end) / mean(start) - 1 : null;
    const weights = groups[0].runs.flatMap((r) => runs[r].weights[s].filter(known));
    const goal = targets[name];
    return el("tr", {}, el("th", { scope: "row" }, swatchFor("objective", s), el("span", {}, name)),
      [spreadOf(start), spreadOf(end), known(change) ? (change > 0 ? "+" : "") + percent(change) : "–", ...measures.slice(1).map((m) => spreadOf(finals(0, s, m))), weights.length ? fmt(mean(weights), 3) : "–",
        ...(aimed ? [goal === undefined ? "–" : `${fmt(goal)} ${end.length && mean(end) <= goal ? "✓ reached" : "not reached"}`] : [])].map((text) => el("td", {}, text)));
  });
  const note = groups[0].runs.length > 1 ? "Mean ± standard deviation over seeds." : "";
  return [el("h3", {}, "Where each objective ended"), note ? el("p", { class: "say" }, note) : null, table(head, rows, "Final losses and metrics")];
}

function compareTable() {
  const box = el("div");
  const show = (measure) => {
    const lower = betterOf(measure) === "lower", higher = betterOf(measure) === "higher";
    const values = groups.map((_, g) => objectives.map((_, s) => finals(g, s, measure)));
    const means = values.map((row) => row.map((v) => (v.length ? mean(v) : null)));
    const best = (pickOf) => { 
      // Within one percent of the best is as good as the best; where all are, none stands out.
      const found = means.map((row, g) => (firstRun(g).alone ? null : pickOf(row))), k = found.filter(known);
      if (k.length < 2 || !(lower || higher)) return found.map(() => false);
      const top = lower ? Math.min(...k) : Math.max(...k), near = (v) => known(v) && Math.abs(v - top) <= 0.01 * Math.abs(top);
      return k.every(near) ? found.map(() => false) : found.map(near);
    };
    const overall = (row) => { const k = row.filter(known); return k.length ? mean(k) : null; };
    const bold = objectives.map((_, s) => best((row) => row[s])), boldAll = best(overall);
    const head = ["run", "seeds", "rounds", ...(objectives.length > 1 ? ["mean of all"] : []), ...objectives];
    const rows = groups.map((group, g) => el("tr", {}, el("th", { scope: "row" }, swatchFor("run", g), el("span", {}, group.label)),
      el("td", {}, whole(group.runs.length)), el("td", {}, listed([...new Set(group.runs.map((r) => whole(runs[r].done)))])),
      objectives.length > 1 ? el("td", { class: boldAll[g] ? "best" : null }, fmt(overall(means[g]))) : null,
      objectives.map((_, s) => el("td", { class: bold[s][g] ? "best" : null }, spreadOf(values[g][s])))));
    box.replaceChildren(table(head, rows, "Final values by run"));
    fillSwatches();
  };
  const choose = pick("Measure", measures.map((m) => [m, measureName(m)]), "loss", show);
  const alone = groups.some((_, g) => firstRun(g).alone) ? " In a run of `Alone` each client is measured at its own model, so it is left out of that." : "";
  const node = [el("h3", {}, "Where each run ended"), el("p", { class: "say" }, prose(`The best of each column is bold, with what is within one percent of it${seeds > 1 ? "; mean ± standard deviation over seeds" : ""}.${alone}`)), el("div", { class: "controls" }, choose.node), box];
  show("loss");
  return node;
}

// ---- losses ----------------------------------------------------------------------------------

const MOST_PANELS = 12;
/** Panels of loss against rounds or megabytes: one with all objectives, or one per objective with all runs. */
function lossPanels(measure, view, x, look) {
  const chosen = visibleObjectives(), drawn = visibleGroups();
  if (!chosen.length) return NONE_SHOWN;
  if (comparing && !drawn.length) return NO_RUN_SHOWN;
  const sent = (g) => x !== "MB" || groups[g].runs.some((r) => (last(runs[r].up) || 0) + (last(runs[r].down) || 0) > 0);
  const line = (g, s) => ({ ...lossOf(groups[g], s, measure, x), name: comparing ? groups[g].label : objectives[s] });
  let result;
  if (single) {
    result = [{ series: chosen.filter(() => sent(0)).map((s) => ({ ...line(0, s), color: ofObjective(s, look), dash: dash(s, objectives.length), keys: objectiveKeys(s) })) }];
  } else if (view === "each") {
    result = chosen.slice(0, MOST_PANELS).map((s) => ({ title: objectives[s], series: drawn.filter(sent).map((g) => ({ ...line(g, s), color: ofGroup(g, look), dash: dash(g, groups.length), keys: { ...objectiveKeys(s), ...groupKeys(g) } })) }));
  } else {
    const relative = measure.endsWith("loss"), worstIs = betterOf(measure) === "higher" ? Math.min : Math.max;
    const fold = (g, how) => {
      const rows = chosen.map((s) => line(g, s).points).filter((p) => p.length);
      const table = new Map();
      for (const points of rows) for (const [at, v, round] of points) {
        const entry = table.get(round) || { x: at, values: [] };
        entry.values.push(relative && points[0][1] > 0 ? v / points[0][1] : v);
        table.set(round, entry);
      }
      return [...table].filter(([, e]) => e.values.length === rows.length).map(([round, e]) => [e.x, how(e.values), round]);
    };
    const of = relative ? `${measureName(measure)} ÷ that at round 0` : measureName(measure);
    result = [["mean over objectives", mean], ["worst objective", (v) => worstIs(...v)]].map(([title, how]) => ({
      title: `${title}: ${of}`, series: drawn.filter(sent).map((g) => ({ name: groups[g].label, points: fold(g, how), color: ofGroup(g, look), dash: dash(g, groups.length), keys: groupKeys(g) })) }));
  }
  result.forEach((p) => { p.series = p.series.filter((s) => s.points.length); });
  return result.filter((p) => p.series.length);
}

function lossCard(id, title, x, say) {
  const state = { measure: "loss", axis: "log", view: comparing && objectives.length > MOST_PANELS ? "all" : "each" };
  const controls = [];
  if (measures.length > 1) controls.push(pick("Measure", measures.map((m) => [m, measureName(m)]), "loss", (v) => { state.measure = v; redraw(id)(); }));
  controls.push(choice("Vertical axis", [["log", "log"], ["linear", "linear"]], state.axis, (v) => { state.axis = v; redraw(id)(); }));
  if (comparing && objectives.length > 1) controls.push(choice("Objectives", [["each", "each objective"], ["all", "mean and worst"]], state.view, (v) => { state.view = v; redraw(id)(); }));
  const hidden = () => state.view === "each" && comparing && visibleObjectives().length > MOST_PANELS ? ` The first ${MOST_PANELS} chosen objectives of ${visibleObjectives().length} are drawn.` : "";
  return makeCard({
    id, title, wide: true, controls, say: () => say(state) + hidden(),
    draw(width, look, exporting) {
      const found = lossPanels(state.measure, state.view, x, look);
      if (typeof found === "string") return found;
      if (!found.length) return x === "MB" ? "Nothing was sent in these runs, so there is no traffic to compare with." : `No ${measureName(state.measure)} was measured for what is chosen.`;
      const positive = found.some((p) => p.series.some((s) => s.points.some((q) => q[1] > 0)));
      const word = comparing && state.view === "all" ? (state.measure.endsWith("loss") ? "ratio to round 0" : "value") : measureName(state.measure);
      return drawLines({
        title, label: `${title}: ${measureName(state.measure)}`, panels: found,
        x: x === "MB" ? { label: "communication, up and down (MB)", word: "MB", min: 0 } : { label: "round", whole: true },
        y: { label: word, log: state.axis === "log" && positive },
      }, width, look, exporting);
    },
  });
}

function losses() {
  const sampled = runs.filter((r) => r.sampled);
  const evaluated = [...new Set(runs.map((r) => r.evaluated).filter(Boolean))];
  const over = evaluated.length ? `Training losses are over ${listed(evaluated)}` : "";
  const lead = [over ? over + ", at the model the round begins with." : "", sampled.length ? `Of ${whole(Math.max(...sampled.map((r) => r.done)))} rounds ${whole(sampled[0].t.length)} are drawn, evenly spread.` : ""].filter(Boolean).join(" ");
  section("losses", "Losses", lead, lossCard("losses", "Loss over rounds", "round", (state) => {
    const way = betterOf(state.measure) === "lower" ? "Lower is better" : betterOf(state.measure) === "higher" ? "Higher is better" : "Each line is one value over rounds";
    const rest = comparing ? " Each panel is an objective, each line a run." : manyObjectives ? " Each line is an objective; point at one to pick it out." : " Each line is an objective.";
    return way + "." + (comparing && state.view === "all" ? " All chosen objectives in one number, each run a line." : rest) + (state.axis === "log" ? " On the log axis equal heights are equal ratios." : "") + (comparing && state.view === "all" ? "" : bandWords);
  }));
}

// ---- weights and direction -------------------------------------------------------------------

function weightsCard() {
  const id = "weights", state = { group: 0, view: manyObjectives ? "map" : "stack" };
  // Weights that are found are more to look at than weights that are given.
  state.group = Math.max(0, [(g) => firstRun(g).scalars.gap, (g) => !firstRun(g).alone].map((wanted) => groups.findIndex((_, g) => wanted(g))).find((g) => g >= 0) ?? 0);
  const controls = [choice("Kind of chart", [["stack", "stacked"], ["lines", "lines"], ["map", "map"]], state.view, (v) => { state.view = v; redraw(id)(); })];
  if (comparing) controls.unshift(pick("Run", groupOptions(), state.group, (v) => { state.group = Number(v); redraw(id)(); }));
  return makeCard({
    id, title: "Weights λ over rounds", wide: true, controls,
    say: () => ({ stack: "How much each objective counts in the direction of a round: the weights add up to one, so a wide band is an objective that decides.", lines: "How much each objective counts in the direction of a round.", map: "Each row is an objective, each column a round: the darker, the more it counts in the direction." }[state.view].replace("darker", theme().name === "dark" ? "brighter" : "darker") + (groups[state.group].runs.length > 1 ? " Means over seeds." : "")),
    draw(width, look, exporting) {
      const group = groups[state.group], run = firstRun(state.group), chosen = visibleObjectives();
      if (!chosen.length) return NONE_SHOWN;
      if (run.alone) return "With `Alone` every client follows its own objectives; no weights are shared.";
      const lines = chosen.map((s) => ({ s, ...gather(group, (r) => [r.t, r.weights[s]]) }));
      const rounds = [...new Set(lines.flatMap((l) => l.points.map((p) => p[2])))].sort((a, b) => a - b);
      if (!rounds.length) return "No round was run, so there are no weights.";
      const title = `Weights λ over rounds${comparing ? `: ${group.label}` : ""}`;
      if (state.view === "lines") return drawLines({ title, panels: [{ series: lines.map((l) => ({ ...l, name: objectives[l.s], color: ofObjective(l.s, look), dash: dash(l.s, objectives.length), keys: objectiveKeys(l.s) })) }], x: { label: "round", whole: true }, y: { label: "weight λ", zero: true } }, width, look, exporting);
      const values = lines.map((l) => { const at = new Map(l.points.map((p) => [p[2], p[1]])); return rounds.map((t) => (at.has(t) ? at.get(t) : null)); });
      if (state.view === "stack") return drawStack({ title, rounds, x: { label: "round" }, y: { label: "weight λ" }, series: lines.map((l, i) => ({ name: objectives[l.s], color: ofObjective(l.s, look), values: values[i], keys: objectiveKeys(l.s) })) }, width, look, exporting);
      const bucket = Math.ceil(rounds.length / 80), columns = [];
      for (let i = 0; i < rounds.length; i += bucket) columns.push(i);
      const cell = (r, c) => { const part = values[r].slice(columns[c], columns[c] + bucket).filter(known); return part.length ? mean(part) : null; };
      const most = Math.max(...values.flat().filter(known), 1e-9);
      return drawHeat({
        title, rows: chosen.map((s) => (manyObjectives ? `${s + 1} ${objectives[s]}` : objectives[s])), columns: columns.map((i) => String(rounds[i])), sequence: bucket, widest: 40, columnLabel: bucket > 1 ? `round (means of ${bucket} rounds)` : "round",
        value: cell, color: (v, l) => amount(Math.sqrt(v / most), l), keys: (r) => objectiveKeys(chosen[r]),
        key: { from: 0, to: 1, value: (p) => p * p * most, ends: ["0", fmt(most, 3)], words: "weight λ" },
        tip: (r, c) => ({ title: `round ${rounds[columns[c]]}`, rows: [{ name: objectives[chosen[r]], text: fmt(cell(r, c)), color: ofObjective(chosen[r], look) }] }),
      }, width, look, exporting);
    },
  });
}

const QUANTITIES = {
  direction: ["‖d‖², the direction taken", "‖d‖²"],
  true_direction: ["‖d̄‖², the same weights on true gradients", "‖d̄‖²"],
  stationarity: ["‖d*‖², best weights on true gradients", "‖d*‖²"],
  optimality_gap: ["Δ_Q, distance to the optimum in loss", "Δ_Q"],
  gap: ["certificate gap", "gap"],
  min_cosine: ["lowest cosine of an update with the direction", "cosine"],
};
const measured = (keys) => keys.filter((key) => runs.some((r) => r.scalars[key]));

function scalarCard({ id, title, keys, say, log, none, y, range }) {
  const have = measured(keys), state = { axis: log ? "log" : "linear", key: have[0] };
  const controls = [];
  if (have.length && log) controls.push(choice("Vertical axis", [["log", "log"], ["linear", "linear"]], state.axis, (v) => { state.axis = v; redraw(id)(); }));
  if (comparing && have.length > 1) controls.push(pick("Quantity", have.map((k) => [k, QUANTITIES[k][0]]), state.key, (v) => { state.key = v; redraw(id)(); }));
  return makeCard({
    id, title, controls, say: () => (have.length ? say() + bandWords : ""),
    draw(width, look, exporting) {
      if (!have.length) return none;
      const series = single
        ? have.map((key, i) => ({ ...gather(groups[0], (r) => [r.t, r.scalars[key]]), name: QUANTITIES[key][0], color: EIGHT[look.name][i], dash: DASHES[i], keys: { "data-measure": key } }))
        : visibleGroups().map((g) => ({ ...gather(groups[g], (r) => [r.t, r.scalars[state.key]]), name: groups[g].label, color: ofGroup(g, look), dash: dash(g, groups.length), keys: groupKeys(g) }));
      const good = series.filter((s) => s.points.length);
      if (!good.length) return comparing ? "Not measured in the runs that are chosen." : none;
      const logged = state.axis === "log" && good.some((s) => s.points.some((p) => p[1] > 0));
      return drawLines({ title: comparing ? `${title}: ${QUANTITIES[state.key][0]}` : title, panels: [{ series: good }], x: { label: "round", whole: true }, y: { label: comparing ? QUANTITIES[state.key][1] : y, log: logged, ...range } }, width, look, exporting);
    },
  });
}

const noUpdates = () => {
  const names = [...new Set(runs.map((r) => r.algorithm))];
  return names.some((n) => n === "FedAvg" || n === "Alone")
    ? `${listed(names.map((n) => `\`${n}\``))} ${names.length > 1 ? "train" : "trains"} one mixture of the objectives, so there is no update per objective, and nothing to show here.`
    : "Not measured in any round.";
};

function direction() {
  const gaps = runs.flatMap((r) => r.scalars.gap || []).filter(known);
  // Within the solver's tolerance differences are rounding: on an axis of their own they would look like news.
  const tolerance = 1e-9, flat = gaps.length && gaps.every((v) => Math.abs(v) <= tolerance);
  const gapWords = !gaps.length ? "" : flat ? ` It holds in every round, to rounding (largest gap ${fmt(Math.max(...gaps), 2)}); the axis spans the tolerance.` : ` The largest here is ${fmt(Math.max(...gaps), 2)}.`;
  const lead = measured(["gap"]).length
    ? "Each round weighs the objectives' updates so that they add up to one direction that helps every objective at once."
    : "Here the objectives' weights are given, not found from round to round.";
  section("direction", "Weights and direction", lead,
    weightsCard(), grid(
      scalarCard({ id: "stationarity", title: "How far from stationary", keys: ["direction", "true_direction", "stationarity", "optimality_gap"], log: true, y: "squared length",
        say: () => `Towards zero no step helps every objective any more.${measured(["stationarity"]).length ? " ‖d*‖² on true gradients is the paper's measure with the best weights." : " True gradients were not asked for, so only the direction taken is drawn."}`, none: noUpdates() }),
      scalarCard({ id: "certificate", title: "The certificate", keys: ["gap"], y: "gap", range: flat ? { min: -tolerance, max: tolerance } : {},
        say: () => `How far a round's weights miss the condition ⟨Δₛ, d⟩ ≥ ‖d‖², as a part of ‖d‖²: zero or below means that every objective is helped as the proof asks.${gapWords}`, none: noUpdates() })));
}

// ---- radar and trade-off ---------------------------------------------------------------------

const lossTables = new Map();
/** Mean loss of an objective in a group at a round, or at the last one measured before it. */
function lossAt(g, s, round) {
  const key = `${g}:${s}`;
  if (!lossTables.has(key)) lossTables.set(key, lossOf(groups[g], s, "loss").points);
  let found = null;
  for (const [, v, at] of lossTables.get(key)) if (at <= round) found = v; else break;
  return found;
}
function radarCard() {
  const id = "radar";
  const rounds = [...new Set(groups.flatMap((g) => objectives.flatMap((_, s) => lossOf(g, s, "loss").points.map((p) => p[2]))))].sort((a, b) => a - b);
  const end = Math.max(rounds.length - 1, 0), quarter = Math.floor(end / 4);
  const state = { kept: single && end > 3 ? [...new Set([0, quarter])] : [0], axis: "linear" };
  const slider = slide(single ? "Round" : "At round", rounds, end, redraw(id));
  const keep = el("button", { type: "button", class: "small", onclick: () => { if (!state.kept.includes(slider.at)) state.kept = [...state.kept, slider.at].slice(-6); redraw(id)(); } }, "keep this round");
  const drop = el("button", { type: "button", class: "small", onclick: () => { state.kept = []; redraw(id)(); } }, "drop kept");
  const few = () => visibleObjectives().length < 3;
  const ends = groups.flatMap((_, g) => falls(g)).filter(known).sort((a, b) => a - b);
  if (ends.length && (ends[ends.length - 1] > 3 || (ends[0] > 0 && ends[Math.floor(ends.length / 2)] < 0.05))) state.axis = "log";
  const controls = [choice("Scale", [["linear", "linear"], ["log", "log"]], state.axis, (v) => { state.axis = v; redraw(id)(); })];
  if (rounds.length > 1) { controls.push(slider); if (single) controls.push(keep, drop); }
  return makeCard({
    id, title: "Losses beside one another", controls,
    say: () => `Each loss divided by what it was at round ${rounds.length ? rounds[0] : 0}, so 1 is where training began. ${few() ? "The further left, the better." : "The smaller the shape, the better; a dent is an objective that gained more than the others."}${visibleObjectives().length > 12 ? " Spokes are numbered; point at one for its name." : ""}`,
    draw(width, look, exporting) {
      const chosen = visibleObjectives();
      if (!chosen.length) return NONE_SHOWN;
      if (!rounds.length) return "No training loss was measured.";
      const base = (g, s) => lossAt(g, s, rounds[0]);
      if (groups.every((_, g) => chosen.every((s) => !(base(g, s) > 0)))) return "The losses at the start are unknown or not positive, so nothing can be divided by them.";
      const ratio = (g, s, t) => { const b = base(g, s), v = lossAt(g, s, t); return known(b) && b > 0 && known(v) ? v / b : null; };
      let shapes;
      if (single) {
        const kept = [...new Set([...state.kept, slider.at])].sort((a, b) => a - b);
        shapes = kept.map((k, i) => ({ name: `round ${rounds[k]}`, color: EIGHT[look.name][k === slider.at ? 1 : [0, 2, 3, 4, 5, 6][i % 6]], dash: k === slider.at ? "" : DASHES[1 + (i % 3)], fill: k === slider.at ? 0.14 : 0, values: chosen.map((s) => ratio(0, s, rounds[k])), keys: { "data-round": rounds[k] } }));
      } else {
        shapes = visibleGroups().map((g) => ({ name: groups[g].label, color: ofGroup(g, look), dash: dash(g, groups.length), fill: 0.05, values: chosen.map((s) => ratio(g, s, rounds[slider.at])), keys: groupKeys(g) }));
        if (!shapes.length) return NO_RUN_SHOWN;
      }
      const what = { title: comparing ? `Normalised losses at round ${rounds[slider.at]}` : "Normalised losses", spokes: chosen.map((s) => ({ name: objectives[s], number: s + 1 })), shapes, log: state.axis === "log", word: "loss ÷ loss at the start" };
      return chosen.length < 3 ? drawDots(what, width, look, exporting) : drawRadar(what, width, look, exporting);
    },
    below: () => visibleObjectives().length > 12 ? el("details", { class: "spokes" }, el("summary", {}, "Which number is which objective"), el("ol", {}, visibleObjectives().map((s) => el("li", { value: s + 1 }, objectives[s])))) : null,
  });
}

function tradeCard() {
  const id = "trade-off", state = { x: 0, y: Math.min(1, objectives.length - 1), axis: "log", measure: "loss" };
  const options = objectives.map((name, s) => [s, name]);
  const controls = objectives.length > 1 ? [
    pick("Across", options, state.x, (v) => { state.x = Number(v); redraw(id)(); }),
    pick("Up", options, state.y, (v) => { state.y = Number(v); redraw(id)(); }),
    ...(measures.length > 1 ? [pick("Measure", measures.map((m) => [m, measureName(m)]), "loss", (v) => { state.measure = v; redraw(id)(); })] : []),
    choice("Axes", [["log", "log"], ["linear", "linear"]], "log", (v) => { state.axis = v; redraw(id)(); }),
  ] : [];
  return makeCard({
    id, title: "Trade-off between two objectives", controls,
    say: () => (objectives.length > 1 ? `One objective's ${measureName(state.measure)} against another's, a dot a round, from the ring to the big dot.${betterOf(state.measure) === "lower" ? " Towards the lower left both are better." : betterOf(state.measure) === "higher" ? " Towards the upper right both are better." : ""}` : ""),
    draw(width, look, exporting) {
      if (objectives.length < 2) return "There is one objective, so nothing to trade.";
      const drawn = visibleGroups();
      if (!drawn.length) return NO_RUN_SHOWN;
      const paths = drawn.flatMap((g) => groups[g].runs.map((r) => {
        const run = runs[r], table = tableOf(run, state.measure);
        const points = table ? run.at.map((t, i) => [table[state.x][i], table[state.y][i], t]).filter((p) => known(p[0]) && known(p[1])) : [];
        return { name: groups[g].label, color: single && groups[g].runs.length === 1 ? EIGHT[look.name][0] : ofGroup(g, look), dash: comparing ? dash(g, groups.length) : "", points, keys: groupKeys(g) };
      })).filter((p) => p.points.length);
      if (!paths.length) return `No ${measureName(state.measure)} was measured for both at the same round.`;
      const log = state.axis === "log" && paths.some((p) => p.points.some((q) => q[0] > 0 && q[1] > 0));
      const name = (s) => `${measureName(state.measure)}, ${cut(objectives[s], 200)}`;
      return drawPaths({ title: "Trade-off between two objectives", paths, x: { label: name(state.x), word: objectives[state.x], log }, y: { label: name(state.y), word: objectives[state.y], log } }, width, look, exporting);
    },
  });
}

// ---- who has what ----------------------------------------------------------------------------

function holdings() {
  const portraits = data.portraits, ofPortrait = (p) => listed([...new Set(runs.filter((r) => r.portrait === p).map((r) => r.name))].slice(0, 3));
  const federations = portraits.map((_, p) => [p, `${p + 1}: ${ofPortrait(p)}`]);
  const some = (p) => (p.size > p.clients.length ? ` ${whole(p.clients.length)} of ${whole(p.size)} clients are drawn, evenly spread.` : "");
  const one = { at: 0 }, two = { at: 0, column: Object.keys(portraits[0].labels)[0] };
  const first = makeCard({
    id: "holdings", title: "Which client holds which objective",
    controls: portraits.length > 1 ? [pick("Federation", federations, 0, (v) => { one.at = Number(v); redraw("holdings")(); })] : [],
    say: () => `A filled cell: the client trains for that objective (the matrix A).${portraits[one.at].clients.some((c) => known(c.samples)) ? " Bars are its training samples." : ""}${some(portraits[one.at])}`,
    draw(width, look, exporting) {
      const p = portraits[one.at], chosen = visibleObjectives().filter((s) => p.objectives.includes(objectives[s]));
      if (!chosen.length) return NONE_SHOWN;
      const holds = (r, s) => p.clients[r].holds.includes(p.objectives.indexOf(objectives[s]));
      const known_ = p.clients.some((c) => known(c.samples));
      return drawHeat({
        title: "Which client holds which objective", rows: p.clients.map((c) => c.id), columns: chosen.map((s) => objectives[s]), rowLabel: "client", widest: 110, columnLabel: chosen.length > 12 ? "objective (by number where narrow)" : "objective",
        value: (r, c) => (holds(r, chosen[c]) ? 1 : null), color: (v, l) => amount(0.75, l), keys: (r, c) => objectiveKeys(chosen[c]),
        bars: known_ ? { label: "samples", values: p.clients.map((c) => c.samples) } : null,
        tip: (r, c) => ({ title: p.clients[r].id, rows: [{ name: objectives[chosen[c]], text: holds(r, chosen[c]) ? "held" : "not held" }, { name: "training samples", text: whole(p.clients[r].samples) }, ...(known(p.clients[r].held_out) ? [{ name: "held-out samples", text: whole(p.clients[r].held_out) }] : [])] }),
      }, width, look, exporting);
    },
  });
  const columns = [...new Set(portraits.flatMap((p) => Object.keys(p.labels)))];
  const controls = [];
  if (portraits.length > 1) controls.push(pick("Federation", federations, 0, (v) => { two.at = Number(v); redraw("labels")(); }));
  if (columns.length > 1) controls.push(pick("Labels of", columns.map((c) => [c, c]), two.column, (v) => { two.column = v; redraw("labels")(); }));
  const second = makeCard({
    id: "labels", title: "Which labels a client has", controls,
    say: () => (columns.length ? `Training samples per label of \`${two.column}\`. Even rows: all clients see the same; a few filled cells a row: each client knows some labels only.${some(portraits[two.at])}` : ""),
    draw(width, look, exporting) {
      const p = portraits[two.at], labels = p.labels[two.column];
      if (!labels) return "The targets are not labels (few distinct whole numbers), or the data come only when they are needed; so there is nothing to count.";
      const count = (r, c) => (p.clients[r].labels[two.column] || [])[c], most = Math.max(...p.clients.flatMap((c) => c.labels[two.column] || [0]), 1);
      return drawHeat({
        title: `Samples per label of ${two.column}`, rows: p.clients.map((c) => c.id), columns: labels, rowLabel: "client", columnLabel: "label",
        value: (r, c) => { const n = count(r, c); return n ? n : null; }, color: (v, l) => amount(0.12 + 0.88 * (v / most), l), text: (v) => whole(v),
        bars: p.clients.some((c) => known(c.samples)) ? { label: "samples", values: p.clients.map((c) => c.samples) } : null,
        key: { from: 0, to: most, ends: ["0", whole(most)], words: "samples" },
        tip: (r, c) => ({ title: p.clients[r].id, rows: [{ name: `label ${labels[c]}`, text: whole(count(r, c) || 0) }, { name: "all samples", text: whole(p.clients[r].samples) }] }),
      }, width, look, exporting);
    },
  });
  section("holdings-section", "Who has what", `${many(portraits[0].size, "client")}, ${many(portraits[0].objectives.length, "objective")}${known(portraits[0].held_out) ? `, and ${many(portraits[0].held_out, "sample")} held out at the server` : ""}.`, grid(first, second));
}

// ---- clients ---------------------------------------------------------------------------------

function clientsCards() {
  const able = runs.map((r, i) => i).filter((i) => runs[i].clients);
  const own = able.find((i) => !runs[i].alone);
  const state = { run: own === undefined ? able[0] : own, measure: "loss", view: data.alone.length && own !== undefined ? "gain" : "value" };
  const metrics = [...new Set([...able.map((i) => runs[i].clients), ...data.alone.map((a) => a.clients)].flatMap((c) => Object.keys(c.held_out)))];
  const all = ["loss", ...metrics.map((m) => `held_out:${m}`)];
  const shared = metrics.filter((m) => own !== undefined && runs[own].clients.held_out[m] && data.alone.some((a) => a.clients.held_out[m]));
  // Learning one's own data by heart is no gain: where there are held-out values they come first.
  if (state.view === "gain" && shared.length) state.measure = `held_out:${shared[0]}`;
  const both = () => { redraw("clients")(); redraw("spread")(); };
  const controls = [];
  if (able.length > 1) controls.push(pick("Run", able.map((i) => [i, `${runs[i].name}, seed ${runs[i].seed}`]), state.run, (v) => { state.run = Number(v); both(); }));
  if (all.length > 1) controls.push(pick("Measure", all.map((m) => [m, measureName(m)]), state.measure, (v) => { state.measure = v; both(); }));
  if (data.alone.length) controls.push(choice("Show", [["value", "value"], ["gain", "gain over alone"], ["ratio", "ratio to alone"]], state.view, (v) => { state.view = v; both(); }));
  const from = (clients) => (state.measure === "loss" ? clients.loss : clients.held_out[state.measure.slice(9)]);
  const way = () => betterOf(state.measure) || (/accuracy|auc|f1|score/i.test(state.measure) ? "higher" : "lower");
  const prepare = () => {
    const run = runs[state.run];
    if (!run) return null;
    const mine = from(run.clients);
    const other = data.alone.find((a) => a.seed === run.seed) || data.alone[0];
    const theirs = other && from(other.clients), place = other ? new Map(other.clients.ids.map((c, i) => [c, i])) : new Map();
    const value = (r, s) => (mine ? mine[r][s] : null);
    const alone = (r, s) => { const i = place.get(run.clients.ids[r]); return theirs && i !== undefined ? theirs[i][s] : null; };
    const sign = way() === "lower" ? -1 : 1;
    const gain = (r, s) => { const a = value(r, s), b = alone(r, s); return known(a) && known(b) ? sign * (a - b) : null; };
    const ratio = (r, s) => { const a = value(r, s), b = alone(r, s); return known(a) && known(b) && b > 0 && a > 0 ? a / b : null; };
    const plain = state.view === "value" || run.alone;
    return { run, value, alone, gain, ratio, sign, other, plain, ids: run.clients.ids, cell: plain ? value : state.view === "gain" ? gain : ratio };
  };
  const nothing = (now) => (now.plain ? `No ${measureName(state.measure)} of a single client was recorded.` : `There is no ${measureName(state.measure)} of the same clients alone to compare with.`);
  const quantity = (now) => (now.plain ? measureName(state.measure) : state.view === "ratio" ? `${measureName(state.measure)} ÷ alone` : `gain in ${measureName(state.measure)}`);
  const when = (now) => { const [a, b] = now.run.clients.rounds; return a === b ? `at round ${a}` : `as last measured, between rounds ${a} and ${b}`; };

  const heat = makeCard({
    id: "clients", title: "Every client and objective", wide: manyObjectives, controls,
    say() {
      const now = prepare();
      if (!now) return "";
      const part = now.run.clients.total > now.ids.length ? ` ${now.ids.length} of ${whole(now.run.clients.total)} clients are drawn.` : "";
      const name = measureName(state.measure);
      if (now.plain) return `${name[0].toUpperCase()}${name.slice(1)} at each client, ${when(now)}. Empty: not held, or not measured.${part}`;
      let up = 0, count = 0;
      now.ids.forEach((_, r) => objectives.forEach((_, s) => { const g = now.gain(r, s); if (known(g)) { count += 1; if (g > 0) up += 1; } }));
      return `What taking part brings over training alone (${many(now.other.rounds, "round")}), ${when(now)}. Blue: better off than alone; orange: worse off. ${up} of ${count} pairs of client and objective are better off.${state.measure === "loss" ? " On training data a client alone is hard to beat: it may learn its few samples by heart." : ""}${part}`;
    },
    draw(width, look, exporting) {
      const now = prepare(), chosen = visibleObjectives();
      if (!now) return "No loss of a single client was recorded.";
      if (!chosen.length) return NONE_SHOWN;
      const { ids, cell, plain } = now, values = ids.flatMap((_, r) => chosen.map((s) => cell(r, s))).filter(known);
      if (!values.length) return nothing(now);
      let color, key;
      if (plain) {
        const low = Math.min(...values), high = Math.max(...values), log = low > 0 && high / low > 20;
        const part = (v) => (high === low ? 0.5 : log ? Math.log(v / low) / Math.log(high / low) : (v - low) / (high - low));
        color = (v, l) => amount(0.06 + 0.94 * part(v), l);
        key = { from: 0, to: 1, value: (p) => (log ? low * (high / low) ** p : low + p * (high - low)), ends: [fmt(low, 3), fmt(high, 3)], words: quantity(now) + (log ? " (log)" : "") };
      } else {
        const turned = state.view === "ratio" ? (v) => now.sign * Math.log2(v) : (v) => v;
        const most = Math.max(...values.map((v) => Math.abs(turned(v))), 1e-12);
        color = (v, l) => balance(turned(v) / most, l);
        const back = state.view === "ratio" ? (p) => 2 ** (now.sign * p * most) : (p) => p * most;
        key = { from: -1, to: 1, value: back, ends: state.view === "ratio" ? [`${fmt(back(-1), 3)} worse`, `${fmt(back(1), 3)} better`] : [`${fmt(-most, 3)} worse`, `+${fmt(most, 3)} better`], words: quantity(now) };
      }
      return drawHeat({
        title: `${quantity(now)} per client and objective`, rows: ids, columns: chosen.map((s) => objectives[s]), rowLabel: "client", columnLabel: "objective", widest: 130,
        value: (r, c) => cell(r, chosen[c]), color, key, text: (v) => fmt(v, 3), keys: (r, c) => objectiveKeys(chosen[c]),
        tip: (r, c) => { const s = chosen[c]; return { title: `${ids[r]}, ${objectives[s]}`, rows: [{ name: measureName(state.measure), text: fmt(now.value(r, s)) }, ...(now.other ? [{ name: "alone", text: fmt(now.alone(r, s)) }, { name: "gain", text: fmt(now.gain(r, s)) }] : [])] }; },
      }, width, look, exporting);
    },
  });
  const strip = makeCard({
    id: "spread", title: "Are clients served alike?", wide: manyObjectives,
    say: () => `Each dot is a client, the bar their median: the longer a row, the more the model suits some clients better than others.${prepare() && !prepare().plain ? ` ${state.view === "ratio" ? "At 1" : "At 0"} a client is as well off as alone.` : ""}`,
    draw(width, look, exporting) {
      const now = prepare(), chosen = visibleObjectives();
      if (!now) return "No loss of a single client was recorded.";
      if (!chosen.length) return NONE_SHOWN;
      const rows = chosen.map((s) => ({ name: manyObjectives ? `${s + 1} ${objectives[s]}` : objectives[s], color: single ? ofObjective(s, look) : EIGHT[look.name][0], keys: objectiveKeys(s), dots: now.ids.map((id, r) => ({ name: id, value: now.cell(r, s) })).filter((d) => known(d.value)) }));
      const values = rows.flatMap((r) => r.dots.map((d) => d.value));
      if (!values.length) return nothing(now);
      const low = Math.min(...values), high = Math.max(...values);
      return drawStrip({ title: `${quantity(now)}: clients beside one another`, rows, x: { label: quantity(now), log: state.view !== "gain" && low > 0 && high / low > 20 }, line: now.plain ? null : state.view === "ratio" ? 1 : 0 }, width, look, exporting);
    },
  });
  return manyObjectives ? stack(heat, strip) : grid(heat, strip);
}

// ---- conflict --------------------------------------------------------------------------------

function conflicts() {
  const rates = groups.map((g) => g.runs.map((r) => runs[r].conflict_rate).filter(known));
  const anyRate = rates.some((r) => r.length);
  const lead = objectives.length < 2 ? "There is one objective, so no conflict."
    : !anyRate ? noUpdates()
    : single ? `In ${percent(mean(rates[0]))} of the rounds the plain mean of the updates would have hurt some objective: the conflict rate.`
    : `The conflict rate is the share of rounds in which the plain mean of the updates would have hurt some objective: ${listed(groups.map((g, i) => [g, rates[i]]).filter(([, r]) => r.length).map(([g, r]) => `${percent(mean(r))} in \`${g.label}\``))}.`;
  if (objectives.length < 2 || !anyRate) { section("conflict", "Conflict between objectives", lead); return; }
  const state = { key: "lowest", run: runs.findIndex((r) => r.cosines.rounds.length) };
  const lines = makeCard({
    id: "cosines", title: "How opposed the updates are",
    controls: comparing ? [pick("Quantity", [["lowest", "most opposed pair of updates"], ["min_cosine", "worst update against the direction"]], "lowest", (v) => { state.key = v; redraw("cosines")(); })] : [],
    say: () => "A cosine of 1: two updates pull the same way; below 0: what helps one hurts the other. The direction itself should stay above 0 with every update." + bandWords,
    draw(width, look, exporting) {
      const get = (key) => (r) => [r.t, key === "lowest" ? r.lowest : r.scalars.min_cosine];
      const series = (single
        ? [["lowest", "most opposed pair of updates"], ["min_cosine", "worst update against the direction"]].map(([key, name], i) => ({ ...gather(groups[0], get(key)), name, color: EIGHT[look.name][i], dash: DASHES[i], keys: { "data-measure": key } }))
        : visibleGroups().map((g) => ({ ...gather(groups[g], get(state.key)), name: groups[g].label, color: ofGroup(g, look), dash: dash(g, groups.length), keys: groupKeys(g) }))).filter((s) => s.points.length);
      if (!series.length) return "The runs that are chosen have no updates per objective, so no cosines.";
      return drawLines({ title: "How opposed the updates are", panels: [{ series }], x: { label: "round", whole: true }, y: { label: "cosine", zero: true } }, width, look, exporting);
    },
  });
  const places = () => runs[state.run].cosines.rounds;
  const slider = slide("Round", places(), places().length - 1, () => redraw("pairs")());
  const controls = [slider], able = runs.map((r, i) => i).filter((i) => runs[i].cosines.rounds.length);
  if (able.length > 1) controls.unshift(pick("Run", able.map((i) => [i, `${runs[i].name}, seed ${runs[i].seed}`]), state.run, (v) => { state.run = Number(v); slider.reset(places(), places().length - 1); redraw("pairs")(); }));
  const pairs = makeCard({
    id: "pairs", title: "Cosines between pairs of updates", controls,
    say: () => `Blue: the two objectives pull together at this round; orange: against each other.${places().length < runs[state.run].done ? ` Kept for ${many(places().length, "round")}.` : ""}`,
    draw(width, look, exporting) {
      const table = runs[state.run].cosines, size = table.objectives.length, values = table.values[slider.at];
      const own = new Map(table.objectives.map((s, i) => [s, i])), chosen = visibleObjectives().filter((s) => own.has(s));
      if (chosen.length < 2) return "Choose at least two objectives in the bar above.";
      const cosine = (r, c) => {
        let [i, j] = [own.get(chosen[r]), own.get(chosen[c])];
        if (i === j) return null;
        if (i > j) [i, j] = [j, i];
        const v = values[i * size - (i * (i + 1)) / 2 + (j - i - 1)];
        return known(v) ? v / 1000 : null;
      };
      return drawHeat({
        title: `Cosines between updates at round ${table.rounds[slider.at]}`, rows: chosen.map((s) => (manyObjectives ? `${s + 1} ${objectives[s]}` : objectives[s])), columns: chosen.map((s) => objectives[s]), square: true, widest: 62,
        value: cosine, color: (v, l) => balance(Math.sign(v) * Math.sqrt(Math.abs(v)), l), text: (v) => fmt(v, 2), key: { from: -1, to: 1, ends: ["−1 opposed", "1 together"], words: "cosine" },
        tip: (r, c) => ({ title: `round ${table.rounds[slider.at]}`, rows: [{ name: `${objectives[chosen[r]]} and ${objectives[chosen[c]]}`, text: r === c ? "itself" : fmt(cosine(r, c), 3) }] }),
      }, width, look, exporting);
    },
  });
  section("conflict", "Conflict between objectives", lead, grid(lines, pairs));
}

// ---- communication and time ------------------------------------------------------------------

function communication() {
  const phases = [...new Set(runs.flatMap((r) => Object.keys(r.seconds)))];
  const per = (g, of) => mean(groups[g].runs.map((r) => of(runs[r]) || 0));
  const time = makeCard({
    id: "seconds", title: "Seconds by phase",
    say: () => `Where the time went, all rounds together${seeds > 1 ? ", mean over seeds" : ""}. In a simulation the clients' seconds are spent one after the other.`,
    draw(width, look, exporting) {
      const rows = visibleGroups().map((g) => ({ name: groups[g].label, keys: groupKeys(g), parts: phases.map((p, i) => ({ name: p, color: EIGHT[look.name][i % 8], value: per(g, (r) => r.seconds[p]) })) })).filter((r) => r.parts.some((p) => p.value > 0));
      if (!rows.length) return "No seconds were recorded.";
      return drawBars({ title: "Seconds by phase", rows, x: { label: "seconds" } }, width, look, exporting);
    },
  });
  const rows = groups.map((group, g) => {
    const up = per(g, (r) => last(r.up)), down = per(g, (r) => last(r.down)), done = per(g, (r) => r.done);
    return el("tr", {}, el("th", { scope: "row" }, comparing ? swatchFor("run", g) : null, el("span", {}, group.label)),
      [fmt(up, 4), fmt(down, 4), fmt(up + down, 4), done ? fmt((up + down) / done, 3) : "–", fmt(phases.reduce((a, p) => a + per(g, (r) => r.seconds[p]), 0), 3)].map((t) => el("td", {}, t)));
  });
  section("communication", "Communication and time", "Counted is what training would put on a wire; evaluating clients outside a cohort is not.",
    lossCard("traffic", "Loss against communication", "MB", () => `What a megabyte buys: all bytes sent so far, up and down, from left to right. A line further left is cheaper.${bandWords}`),
    grid(time, el("div", { class: "card" }, el("div", { class: "card-head" }, el("h3", {}, "Totals")), el("p", { class: "say" }, seeds > 1 ? "Means over seeds." : "All rounds together."), table(["run", "MB up", "MB down", "MB in all", "MB a round", "seconds"], rows, "Communication in total"))));
}

// ---- how it was done -------------------------------------------------------------------------

function copyButton(text) {
  const button = el("button", { type: "button", class: "small", onclick: async () => {
    try { await navigator.clipboard.writeText(text); } catch {
      const area = el("textarea", {}, text);
      document.body.append(area);
      area.select();
      document.execCommand("copy");
      area.remove();
    }
    button.textContent = "copied";
    setTimeout(() => { button.textContent = "copy"; }, 1500);
  } }, "copy");
  return button;
}
/** A configuration as its file has it, one block per table. */
function tomlOf(pairs) {
  const tables = new Map();
  for (const [key, value] of pairs) {
    const [, head, rest] = key.match(/^([^.]+)\.(.+)$/s) || [null, "", key];
    tables.set(head, [...(tables.get(head) || []), `${rest} = ${value}`]);
  }
  const text = [...tables].map(([head, lines]) => `${head ? `[${head}]\n` : ""}${lines.join("\n")}\n`).join("\n");
  return [
    el("div", { class: "tomls" }, [...tables].map(([head, lines]) => el("div", { class: "code" }, el("pre", {}, el("code", {}, head ? [el("b", {}, `[${head}]`), "\n"] : null, lines.join("\n")))))),
    el("p", { class: "say" }, copyButton(text), " all of it, for a config file"),
  ];
}
function methods() {
  const firsts = groups.map((_, g) => firstRun(g));
  const tableOfPairs = (which, label) => {
    const keys = [...new Set(firsts.flatMap((r) => r[which].map(([k]) => k)))].filter((k) => !(which === "config" && k === "seed" && seeds > 1));
    if (!keys.length) return el("p", { class: "nothing" }, label === "Configuration" ? "No configuration was recorded with this run." : "Nothing was recorded.");
    const value = (r, k) => (r[which].find(([key]) => key === k) || [null, "–"])[1];
    const same = (k) => firsts.every((r) => value(r, k) === value(firsts[0], k));
    const differing = keys.filter((k) => !same(k)), equal = keys.filter(same);
    const row = (k) => el("tr", {}, el("th", { scope: "row" }, el("code", {}, k)), firsts.map((r) => el("td", {}, el("code", {}, value(r, k)))));
    const common = equal.length ? table(["", "value"], equal.map((k) => el("tr", {}, el("th", { scope: "row" }, el("code", {}, k)), el("td", {}, el("code", {}, value(firsts[0], k))))), label) : null;
    if (!comparing) return common;
    return [
      differing.length ? table(["", ...groups.map((g) => g.label)], differing.map(row), `${label}: what differs`) : el("p", { class: "nothing" }, "The same in all runs."),
      common ? el("details", {}, el("summary", {}, `${whole(equal.length)} ${equal.length === 1 ? "entry" : "entries"} the same in all`), common) : null,
    ];
  };
  const commands = runs.filter((r) => r.command).map((r) => el("div", { class: "command" }, runs.length > 1 ? el("p", { class: "say" }, `${r.name}, seed ${r.seed}`) : null, el("div", { class: "code" }, el("pre", {}, el("code", {}, r.command)), copyButton(r.command))));
  const folded = commands.length > 3 ? [commands.slice(0, 2), el("details", {}, el("summary", {}, `${commands.length - 2} more`), commands.slice(2))] : commands;
  section("methods", "How it was done", comparing ? "What differs between the runs stands first." : "",
    el("h3", {}, "Configuration"), single && runs[0].config.length ? tomlOf(runs[0].config) : tableOfPairs("config", "Configuration"),
    el("h3", {}, "Environment"), tableOfPairs("environment", "Environment"),
    el("h3", {}, "Do it again"), commands.length ? folded : el("p", { class: "nothing" }, "No command was recorded with this run."));
}

// ---- all of it -------------------------------------------------------------------------------

buildTop();
headline();
losses();
direction();
section("shape", "Objectives against one another", "", grid(radarCard(), tradeCard()));
holdings();
section("clients-section", "What each client gets", "", clientsCards());
conflicts();
communication();
methods();
document.getElementById("body").after(el("footer", {}, "One file, nothing else needed: it can be sent as it is. Arrow keys move through a chart that has the focus."));
applyTheme();

prefersDark.addEventListener("change", () => { if (!shown.theme) applyTheme(); });
let pending = 0;
new ResizeObserver(() => {
  cancelAnimationFrame(pending);
  pending = requestAnimationFrame(() => { for (const card of cards) if (Math.floor(card.stage.clientWidth) !== card.width) card.render(); });
}).observe(main);
window.addEventListener("scroll", hideTip, { passive: true });
