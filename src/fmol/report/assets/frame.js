// What surrounds the sections: the head, the bar that says what is shown, and what sections are made of.

const main = document.getElementById("main"),
  contents = document.getElementById("contents");
const runs = data.runs,
  groups = data.groups;
const manyObjectives = objectives.length > 8;
const single = !comparing;
const groupOptions = (keep = () => true) => groups.map((g, i) => [i, g.label]).filter(([i]) => keep(i));
const objectiveKeys = (s) => ({ "data-objective": s });
const groupKeys = (g) => ({ "data-run": g });
const redraw = (id) => () => cards.find((card) => card.id === id).render();
const firstRun = (g) => runs[groups[g].runs[0]];
const objectivesOf = (run) => data.portraits[run.portrait].objectives;
/** Whether a run has objective `s` at all. */
const has = (run, s) => objectivesOf(run).includes(objectives[s]);
const problems = [...new Set(runs.map((r) => r.problem).filter(Boolean))];
/** Objectives that all runs have; and whether runs can be ranked: all objectives, one problem. */
const shared = objectives.filter((_, s) => runs.every((r) => has(r, s)));
const comparable = shared.length === objectives.length && problems.length < 2;
const several = (values, say = whole) => {
  const found = [...new Set(values)].sort((a, b) => a - b);
  return found.length > 1 ? `${say(found[0])}–${say(found[found.length - 1])}` : say(found[0]);
};
const listedCode = (names, most = 4) =>
  listed([
    ...names.slice(0, most).map((n) => `\`${n}\``),
    ...(names.length > most ? [`${names.length - most} more`] : []),
  ]);
const NONE_SHOWN = "No objective is chosen. Choose some in the bar above.";
const NO_RUN_SHOWN = "No run is chosen. Choose some in the bar above.";

function section(id, title, lead, ...children) {
  contents.append(el("a", { href: `#${id}` }, title));
  main.append(
    el(
      "section",
      { id, "aria-labelledby": `${id}-title` },
      el("h2", { id: `${id}-title` }, title),
      lead ? el("p", { class: "lead" }, prose(lead)) : null,
      children,
    ),
  );
}
const stack = (...children) => el("div", { class: "stack" }, children);
const grid = (...children) => el("div", { class: "grid" }, children);
/** A table that scrolls where it is too large, and says so while part of it is out of sight. */
function table(head, rows, label) {
  const area = el(
    "div",
    { class: "scroll", tabindex: 0, role: "region", "aria-label": label, onscroll: () => hintAt(area) },
    el(
      "table",
      {},
      el(
        "thead",
        {},
        el(
          "tr",
          {},
          head.map((h) => el("th", { scope: "col" }, h)),
        ),
      ),
      el("tbody", {}, rows),
    ),
  );
  return el("div", { class: "scroller" }, area, el("p", { class: "hint", "aria-hidden": "true" }));
}
function hintAt(area) {
  const right = area.scrollWidth - area.clientWidth,
    down = area.scrollHeight - area.clientHeight;
  area.parentNode.classList.toggle("more-right", right - area.scrollLeft > 1);
  area.parentNode.classList.toggle("more-down", down - area.scrollTop > 1);
  const more = [right > 1 ? "columns →" : "", down > 1 ? "rows ↓" : ""].filter(Boolean);
  area.nextSibling.textContent = more.length ? `scroll for more ${more.join(" and ")}` : "";
}
const hintAtMore = () => document.querySelectorAll(".scroller > .scroll").forEach(hintAt);
const swatch = (color, pattern) =>
  sv(
    "svg",
    { class: "line-swatch", width: 22, height: 10, "aria-hidden": "true" },
    sv("line", {
      x1: 0,
      x2: 22,
      y1: 5,
      y2: 5,
      stroke: color,
      "stroke-width": 3,
      "stroke-dasharray": pattern || null,
    }),
  );

// ---- head ------------------------------------------------------------------------------------

/** How many lines a comparison has, and of how many runs, where these are not the same. */
const settingsAndRuns = () =>
  groups.length === runs.length
    ? many(runs.length, "run")
    : `${many(groups.length, "setting")}, ${many(runs.length, "run")}`;
/** What a report is of, in a line; an experiment without runs has its title alone. */
function subtitle() {
  if (!runs.length) return "";
  const run = runs[0],
    sizes = data.portraits.map((p) => p.size);
  const parts = single
    ? [
        run.problem,
        run.algorithm,
        groups[0].runs.length > 1 ? many(groups[0].runs.length, "seed") : `seed ${run.seed}`,
      ]
    : [
        listed(problems),
        settingsAndRuns(),
        seeds > 1
          ? `${groups.every((g) => g.runs.length === seeds) ? "" : "up to "}${many(seeds, "seed")} each`
          : "",
      ];
  parts.push(
    `${several(sizes)} ${Math.max(...sizes) === 1 ? "client" : "clients"}`,
    many(objectives.length, "objective"),
  );
  return parts.filter(Boolean).join(" · ");
}
function buildTop() {
  const toggle = el("button", {
    type: "button",
    id: "theme",
    onclick: () => {
      shown.theme = theme().name === "dark" ? "light" : "dark";
      applyTheme();
    },
  });
  document
    .getElementById("top")
    .append(
      el(
        "div",
        {},
        el("p", { class: "kind" }, "fmol report"),
        el("h1", {}, data.title),
        el("p", { class: "sub" }, subtitle()),
      ),
      toggle,
    );
}
function applyTheme() {
  const look = theme(),
    toggle = document.getElementById("theme");
  document.documentElement.dataset.theme = look.name;
  toggle.textContent = look.name === "dark" ? "☀ Light" : "☾ Dark";
  toggle.setAttribute("aria-label", look.name === "dark" ? "Use light colours" : "Use dark colours");
  buildBar();
  fillSwatches();
  renderAll();
  hintAtMore();
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

let barOpen = false,
  searched = "";
function chip(kind, i, name, hidden, short = name) {
  const count = kind === "objective" ? objectives.length : groups.length;
  const coloured = kind === "run" || single;
  const node = el(
    "button",
    {
      type: "button",
      class: "chip",
      "data-chip": `${kind}:${i}`,
      "aria-pressed": String(!hidden.has(i)),
      title: name,
      onclick: () => {
        if (hidden.has(i)) hidden.delete(i);
        else hidden.add(i);
        syncBar();
        renderAll();
      },
      onpointerenter: () => spotlight(kind, i),
      onpointerleave: () => spotlight(null),
    },
    coloured ? swatch(colour(i, count, theme()), dash(i, count)) : null,
    el("span", {}, kind === "objective" && manyObjectives ? `${i + 1} ${short}` : short),
  );
  return node;
}
/** Everything but one objective or run steps back. */
function spotlight(kind, i) {
  const name = kind === "objective" ? "data-objective" : "data-run";
  for (const mark of document.querySelectorAll(".stage .mark")) {
    if (kind && mark.hasAttribute(name) && mark.getAttribute(name) !== String(i))
      mark.setAttribute("opacity", 0.12);
    else mark.removeAttribute("opacity");
  }
}
function buildBar() {
  const bar = document.getElementById("bar");
  const all = (kind, set, count) => [
    el(
      "button",
      {
        type: "button",
        class: "small",
        "aria-label": `Show all ${kind}s`,
        onclick: () => {
          set.clear();
          syncBar();
          renderAll();
        },
      },
      "all",
    ),
    el(
      "button",
      {
        type: "button",
        class: "small",
        "aria-label": `Show no ${kind}`,
        onclick: () => {
          for (let i = 0; i < count; i++) set.add(i);
          syncBar();
          renderAll();
        },
      },
      "none",
    ),
  ];
  const chips = objectives.map((name, s) => chip("objective", s, name, shown.hiddenObjectives));
  const find = el("input", {
    type: "search",
    placeholder: "find an objective",
    "aria-label": "Find an objective",
    value: searched,
    oninput: () => {
      searched = find.value;
      const wanted = searched.toLowerCase();
      chips.forEach((c, s) => {
        c.hidden = !objectives[s].toLowerCase().includes(wanted);
      });
    },
  });
  const parts = [];
  const shortLabels = elide(
    groups.map((g) => g.label),
    240,
    13,
  );
  if (comparing)
    parts.push(
      el(
        "div",
        { class: "bar-row" },
        el("span", { class: "bar-name" }, "Runs"),
        el(
          "div",
          { class: "chips" },
          groups.map((g, i) => chip("run", i, g.label, shown.hiddenGroups, shortLabels[i])),
        ),
        el("span", { class: "bar-end" }, all("run", shown.hiddenGroups, groups.length)),
      ),
    );
  if (!manyObjectives) {
    parts.push(
      el(
        "div",
        { class: "bar-row" },
        el("span", { class: "bar-name" }, "Objectives"),
        el("div", { class: "chips" }, chips),
        el("span", { class: "bar-end" }, all("objective", shown.hiddenObjectives, objectives.length)),
      ),
    );
  } else {
    const panel = el(
      "details",
      {
        ontoggle: () => {
          barOpen = panel.open;
        },
      },
      el("summary", {}, el("span", { class: "bar-name" }, "Objectives"), " ", el("span", { id: "how-many" })),
      el(
        "div",
        { class: "panel" },
        el(
          "div",
          { class: "bar-row" },
          find,
          el("span", { class: "bar-end" }, all("objective", shown.hiddenObjectives, objectives.length)),
        ),
        el("div", { class: "chips" }, chips),
      ),
    );
    panel.open = barOpen;
    parts.push(panel);
  }
  bar.hidden = !runs.length; // Without runs there is nothing to choose from.
  bar.replaceChildren(...parts);
  if (searched && manyObjectives) find.dispatchEvent(new Event("input"));
  syncBar();
}
function syncBar() {
  for (const node of document.querySelectorAll("[data-chip]")) {
    const [kind, i] = node.dataset.chip.split(":");
    node.setAttribute(
      "aria-pressed",
      String(!(kind === "objective" ? shown.hiddenObjectives : shown.hiddenGroups).has(Number(i))),
    );
  }
  const count = document.getElementById("how-many");
  if (count) count.textContent = `${visibleObjectives().length} of ${objectives.length} shown`;
}
