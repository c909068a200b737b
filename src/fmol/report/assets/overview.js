// At a glance: where things ended, and what a reader should know.

// ---- numbers at the end ----------------------------------------------------------------------

const finals = (g, s, measure) =>
  groups[g].runs
    .map((r) => tableOf(runs[r], measure))
    .filter(Boolean)
    .map((t) => last(t[s]))
    .filter(known);
const starts = (g, s, measure) =>
  groups[g].runs
    .map((r) => tableOf(runs[r], measure))
    .filter(Boolean)
    .map((t) => first(t[s]))
    .filter(known);
function spreadOf(values) {
  if (!values.length) return "–";
  return values.length > 1 ? `${fmt(mean(values), 3)} ± ${fmt(deviation(values), 2)}` : fmt(values[0]);
}
const zeroStarts = new Map();
/** Whether objective `s` begins, in some run, with a loss so near zero that nothing can be measured by it. */
function fromZero(s, measure = "loss") {
  if (!zeroStarts.has(measure)) {
    const found = new Set();
    groups.forEach((_, g) => {
      const begun = objectives
        .map((_, o) => [o, starts(g, o, measure)])
        .filter(([, values]) => values.length)
        .map(([o, values]) => [o, Math.abs(mean(values))]);
      const least = Math.max(1e-6, 1e-5 * Math.max(0, ...begun.map(([, v]) => v)));
      for (const [o, v] of begun) if (v <= least) found.add(o);
    });
    zeroStarts.set(measure, found);
  }
  return zeroStarts.get(measure).has(s);
}
/** Loss at the end divided by that at the start; null where one is unknown or the start near zero. */
function fallOf(g, s) {
  const start = starts(g, s, "loss"),
    end = finals(g, s, "loss");
  if (!start.length || !end.length || !(mean(start) > 0) || fromZero(s)) return null;
  return mean(end) / mean(start);
}
const falls = (g) => objectives.map((_, s) => fallOf(g, s));

const MOST_TOLD = 3;
/** Where the losses of a single run went: what fell, and by name what did not. */
function course() {
  if (runs[0].done === 0) return "No round was run: these are the losses of the untrained model.";
  const ends = objectives
    .map((_, s) => ({ s, start: starts(0, s, "loss"), end: finals(0, s, "loss"), fall: fallOf(0, s) }))
    .filter(({ start, end }) => start.length && end.length)
    .map((each) => ({ ...each, start: mean(each.start), end: mean(each.end) }));
  if (!ends.length) return "No training loss was measured at both ends of this run.";
  const words = ({ s, start, end, fall }) => {
    const change = !known(fall)
      ? ""
      : fall <= 1
        ? `, down ${percent(1 - fall)}`
        : `, up ${percent(fall - 1)}`;
    return `\`${objectives[s]}\` (${fmt(start, 3)} → ${fmt(end, 3)}${change})`;
  };
  const named = (those) =>
    listed([
      ...those.slice(0, MOST_TOLD).map(words),
      ...(those.length > MOST_TOLD ? [`${those.length - MOST_TOLD} more`] : []),
    ]);
  // Those without a ratio stand behind the others: from near zero, most and least mean little.
  const order = (a, b) => (a.fall ?? Infinity) - (b.fall ?? Infinity) || a.s - b.s;
  const fell = ends.filter((e) => e.end < e.start).sort(order),
    rose = ends.filter((e) => e.end > e.start).sort((a, b) => b.end - b.start - (a.end - a.start)),
    same = ends.filter((e) => e.end === e.start);
  const rated = fell.filter((e) => known(e.fall));
  const which =
    fell.length <= 1 || rated.length < 2
      ? named(fell)
      : `most for ${words(rated[0])}, least for ${words(rated[rated.length - 1])}`;
  const whose =
    fell.length < objectives.length
      ? ` for ${fell.length || "none"} of ${many(objectives.length, "objective")}`
      : ends.length === 1
        ? ""
        : ends.length === 2
          ? " for both objectives"
          : ` for all ${ends.length} objectives`;
  const told = [`The training loss fell${whose}${fell.length ? `: ${which}` : ""}.`];
  if (rose.length) told.push(`It rose for ${named(rose)}.`);
  if (same.length) told.push(`It stayed what it was for ${listedCode(same.map((e) => objectives[e.s]))}.`);
  const unknown = objectives.filter((_, s) => !ends.some((e) => e.s === s));
  if (unknown.length) told.push(`It was not measured at both ends for ${listedCode(unknown)}.`);
  return told.join(" ");
}
/** Which objectives with a target are within it at the end; empty where none has one. */
function aims() {
  const targets = data.portraits[0].targets;
  const aimed = objectives
    .map((name, s) => ({ name, goal: targets[name], end: finals(0, s, "loss") }))
    .filter(({ goal, end }) => known(goal) && end.length)
    .map((each) => ({ ...each, end: mean(each.end) }));
  const words = (those) =>
    listed([
      ...those
        .slice(0, MOST_TOLD)
        .map(({ name, end, goal }) => `\`${name}\` (${fmt(end, 3)}, target ${fmt(goal, 3)})`),
      ...(those.length > MOST_TOLD ? [`${those.length - MOST_TOLD} more`] : []),
    ]);
  const within = aimed.filter((e) => e.end <= e.goal),
    beyond = aimed.filter((e) => !(e.end <= e.goal));
  return [
    within.length ? `Within target: ${words(within)}.` : "",
    beyond.length ? `Not within target: ${words(beyond)}.` : "",
  ]
    .filter(Boolean)
    .join(" ");
}
/** Why runs cannot be ranked. */
const whyApart = () =>
  shared.length === objectives.length
    ? `These runs are of different problems (${listedCode(problems)})`
    : shared.length
      ? `These runs share only some objectives (${listedCode(shared)})`
      : "These runs share no objectives";

function summary() {
  if (single) return [course(), aims()].filter(Boolean).join(" ");
  if (!comparable) return `${whyApart()}, so they are shown beside one another and not ranked.`;
  const scores = groups
    .map((_, g) => [falls(g).filter(known), g])
    .filter(([v, g]) => v.length && !firstRun(g).alone)
    .map(([v, g]) => [mean(v), Math.max(...v), g]);
  if (!scores.length) return "No training loss was measured in these runs.";
  const best = [...scores].sort((a, b) => a[0] - b[0])[0],
    worst = [...scores].sort((a, b) => a[1] - b[1])[0];
  const zeros = objectives.filter((_, s) => fromZero(s));
  const but = zeros.length ? ` Left out of this: ${listedCode(zeros)}, which began near zero.` : "";
  const worstOf = Math.max(...scores.map((s) => s[0]));
  if (scores.length > 1 && worstOf <= 1.01 * best[0])
    return `All runs end with about the same training loss: on average over objectives ${percent(best[0])} of where they started.${but}`;
  const about = `\`${groups[best[2]].label}\` ends with the lowest training loss on average over objectives, ${percent(best[0])} of where it started`;
  return best[2] === worst[2]
    ? `${about}; its worst objective is also the best of all runs' worst, at ${percent(worst[1])}.${but}`
    : `${about}; the worst-off objective does best in \`${groups[worst[2]].label}\`, at ${percent(worst[1])}.${but}`;
}

function headline() {
  const portraits = data.portraits,
    tile = (name, value, note) =>
      el(
        "div",
        { class: "tile" },
        el("span", {}, name),
        el("b", {}, value),
        note ? el("small", {}, note) : null,
      );
  const most = Math.max(...runs.map((r) => r.done));
  const tiles = [
    tile("rounds", several(runs.map((r) => r.done)), most > 1 ? `numbered 0 to ${whole(most - 1)}` : ""),
    tile("clients", several(portraits.map((p) => p.size))),
    tile("objectives", whole(objectives.length)),
    tile(
      "parameters",
      several(portraits.map((p) => p.parameters)),
      `model ${listed([...new Set(portraits.map((p) => p.model))])}`,
    ),
  ];
  if (single)
    tiles.push(
      tile(
        "algorithm",
        runs[0].algorithm,
        groups[0].runs.length > 1
          ? `seeds ${listed(groups[0].runs.map((r) => String(runs[r].seed)))}`
          : `seed ${runs[0].seed}`,
      ),
    );
  const traffic = mean(runs.map((r) => (last(r.up) || 0) + (last(r.down) || 0)));
  tiles.push(
    tile(
      "communication",
      traffic < 0.1 ? `${fmt(1000 * traffic, 3)} kB` : `${fmt(traffic, 3)} MB`,
      single ? "up and down" : "mean over runs",
    ),
  );

  section(
    "overview",
    "At a glance",
    summary(),
    el("div", { class: "tiles" }, tiles),
    el("ul", { class: "words" }, happenings()),
    single ? finalTable() : compareTable(),
  );
}

/** Some runs by name, whole settings by theirs; nothing where there is one run only. */
function whose(those) {
  if (runs.length === 1) return "";
  if (those.length === runs.length) return `all ${runs.length} runs`;
  const left = new Set(those);
  const names = groups
    .filter((g) => g.runs.every((r) => left.has(runs[r])))
    .map((g) => {
      g.runs.forEach((r) => left.delete(runs[r]));
      return g.label;
    });
  return few([...names, ...[...left].map((run) => `${run.name}, seed ${run.seed}`)]);
}
const whoIn = (those) => {
  const who = whose(those);
  return who ? [el("span", { class: "who" }, who), ": "] : [];
};

const MOST_BOXES = 5;
/** What a reader should know, a box each: the same in several runs once, and of many the rest folded. */
function happenings() {
  const boxes = new Map();
  /** Adds to the box `key`, begun with `head`, what it says of a run: once where it is the same. */
  const add = (kind, key, run, head, said) => {
    const box = boxes.get(`${kind} ${key}`) || { kind, head, runs: [], said: new Map() };
    boxes.set(`${kind} ${key}`, box);
    if (!box.runs.includes(run)) box.runs.push(run);
    box.said.set(said, [...(box.said.get(said) || []), run]);
  };
  runs.forEach((run) => {
    for (const { objective, reason } of run.unheard)
      add(
        "alarm",
        `unheard ${objective}`,
        run,
        `Nothing was learned for \`${objective}\`:`,
        `it had no update in any of ${many(run.done, "round")}. ${reason ? `The first that was refused: ${reason}.` : "No client that was asked sent one."}`,
      );
    for (const alarm of run.alarms) {
      const when = alarm.stands
          ? `since round ${alarm.since}, until the end`
          : `rounds ${alarm.since} to ${alarm.until}`,
        times = alarm.times > 1 ? `, the last of ${alarm.times} times` : "";
      add(
        "alarm",
        `${alarm.kind} ${alarm.objective}`,
        run,
        `Alarm, ${alarm.kind}${comparing || runs.length > 1 ? ` of \`${alarm.objective}\`` : ""}`,
        `(${when}${times}): ${alarm.message}`,
      );
    }
    for (const fact of [...run.facts, ...run.notes]) add("note", fact, run, "", fact);
  });
  const said = ({ said }) => {
    const [[first], ...others] = said;
    if (!others.length) return prose(first);
    return [
      prose(first),
      el(
        "details",
        {},
        el("summary", {}, `${whole(others.length)} more, of other runs`),
        el(
          "ul",
          {},
          others.map(([text, those]) => el("li", {}, whoIn(those), prose(text))),
        ),
      ),
    ];
  };
  const boxOf = (box) =>
    el(
      "li",
      { class: box.kind },
      whoIn(box.runs),
      box.head ? [el("b", {}, prose(box.head)), " "] : [],
      box.said.size > 1 ? whoIn([...box.said][0][1]) : [],
      said(box),
    );
  const folded = (kind, word) => {
    const found = [...boxes.values()].filter((box) => box.kind === kind).map(boxOf);
    if (found.length <= MOST_BOXES + 1) return found;
    const rest = found.slice(MOST_BOXES);
    return [
      ...found.slice(0, MOST_BOXES),
      el(
        "li",
        { class: kind },
        el(
          "details",
          {},
          el("summary", {}, `${many(rest.length, `more ${word}`)}`),
          el("ul", { class: "words" }, rest),
        ),
      ),
    ];
  };
  const alarms = folded("alarm", "alarm");
  // Quiet would be misread beside an objective that was never heard.
  const quiet = alarms.length ? [] : [el("li", { class: "quiet" }, "No alarms.")];
  return [...alarms, ...endings(), ...refusals(), ...folded("note", "note"), ...quiet];
}

/** Why runs ended. */
function endings() {
  const stops = new Map();
  runs.forEach((run) => {
    const planned = [`all ${run.done} rounds done`, `${run.done} round done`].includes(run.stopped);
    const text = run.finished
      ? planned
        ? run.done
          ? "planned"
          : "No round was asked for."
        : `Ended after ${many(run.done, "round")}: ${(run.stopped || "no reason was recorded").replace(/\.$/, "")}.`
      : `This run has not ended: ${many(run.done, "round")} so far, and the trained model was not evaluated.`;
    stops.set(text, [...(stops.get(text) || []), run]);
  });
  const rounds = (those) =>
    those.length > 1 && new Set(those.map((r) => r.done)).size > 1
      ? `${several(those.map((r) => r.done))} rounds`
      : many(those[0].done, "round");
  return [...stops].map(([text, those]) =>
    el(
      "li",
      { class: those[0].finished ? "quiet" : "warn" },
      stops.size > 1 ? whoIn(those) : [],
      prose(text === "planned" ? `Ended as planned, after ${rounds(those)}.` : text),
    ),
  );
}

function refusals() {
  const refused = runs.filter((run) => run.refused.count);
  const what = ({ count, first }) => [
    el(
      "ul",
      {},
      first.map((text) => el("li", {}, prose(text))),
    ),
    count > first.length ? `… ${count - first.length} more` : "",
  ];
  if (!refused.length) return [];
  const total = refused.reduce((sum, run) => sum + run.refused.count, 0);
  return [
    el(
      "li",
      { class: "warn" },
      whoIn(refused),
      el("b", {}, `${many(total, "refusal")}. `),
      el(
        "details",
        {},
        el("summary", {}, "What and why"),
        refused.map((run) => [
          refused.length > 1 ? el("p", {}, whoIn([run])) : null,
          what(run.refused),
        ]),
      ),
    ),
  ];
}

function finalTable() {
  const targets = data.portraits[0].targets,
    aimed = Object.keys(targets).length > 0;
  const head = [
    "objective",
    "loss at the start",
    "loss at the end",
    "change",
    ...measures.slice(1).map(measureName),
    "mean weight λ",
    ...(aimed ? ["target"] : []),
  ];
  const rows = objectives.map((name, s) => {
    const start = starts(0, s, "loss"),
      end = finals(0, s, "loss");
    const fall = fallOf(0, s);
    const weights = groups[0].runs.flatMap((r) => runs[r].weights[s].filter(known));
    const goal = targets[name];
    return el(
      "tr",
      {},
      el("th", { scope: "row" }, swatchFor("objective", s), el("span", {}, name)),
      [
        spreadOf(start),
        spreadOf(end),
        known(fall)
          ? (fall > 1 ? "+" : "") + percent(fall - 1)
          : start.length && end.length && fromZero(s)
            ? "from near 0"
            : "–",
        ...measures.slice(1).map((m) => spreadOf(finals(0, s, m))),
        weights.length ? fmt(mean(weights), 3) : "–",
        ...(aimed
          ? [
              goal === undefined
                ? "–"
                : `${fmt(goal)} ${end.length && mean(end) <= goal ? "✓ reached" : "not reached"}`,
            ]
          : []),
      ].map((text) => el("td", {}, text)),
    );
  });
  const spared = objectives.filter((_, s) => groups[0].runs.some((r) => runs[r].protected[s]));
  const note = [
    groups[0].runs.length > 1 ? "Mean ± standard deviation over seeds." : "",
    spared.length
      ? `The weight of ${listedCode(spared)} is partly that of a constraint: while protected, an objective does not pull, but has a weight where the direction is turned to spare it.`
      : "",
  ]
    .filter(Boolean)
    .join(" ");
  return [
    el("h3", {}, "Where each objective ended"),
    note ? el("p", { class: "say" }, prose(note)) : null,
    table(head, rows, "Final losses and metrics"),
  ];
}

function compareTable() {
  const box = el("div");
  const show = (measure) => {
    const lower = betterOf(measure) === "lower",
      higher = betterOf(measure) === "higher";
    const values = groups.map((_, g) => objectives.map((_, s) => finals(g, s, measure)));
    const means = values.map((row) => row.map((v) => (v.length ? mean(v) : null)));
    const best = (pickOf) => {
      // Within one percent of the best is as good as the best; where all are, none stands out.
      const found = means.map((row, g) => (firstRun(g).alone ? null : pickOf(row))),
        k = found.filter(known);
      if (!comparable || k.length < 2 || !(lower || higher)) return found.map(() => false);
      const top = lower ? Math.min(...k) : Math.max(...k),
        near = (v) => known(v) && Math.abs(v - top) <= 0.01 * Math.abs(top);
      return k.every(near) ? found.map(() => false) : found.map(near);
    };
    const overall = (row) => {
      const k = row.filter(known);
      return k.length ? mean(k) : null;
    };
    const bold = objectives.map((_, s) => best((row) => row[s])),
      boldAll = best(overall);
    const averaged = objectives.length > 1 && comparable;
    const head = ["run", "seeds", "rounds", ...(averaged ? ["mean of all"] : []), ...objectives];
    const rows = groups.map((group, g) =>
      el(
        "tr",
        {},
        el("th", { scope: "row" }, swatchFor("run", g), el("span", {}, group.label)),
        el("td", {}, whole(group.runs.length)),
        el("td", {}, listed([...new Set(group.runs.map((r) => whole(runs[r].done)))])),
        averaged
          ? el("td", { class: boldAll[g] ? "best" : null }, fmt(overall(means[g])))
          : null,
        objectives.map((_, s) => el("td", { class: bold[s][g] ? "best" : null }, spreadOf(values[g][s]))),
      ),
    );
    box.replaceChildren(table(head, rows, "Final values by run"));
    fillSwatches();
    hintAtMore();
  };
  const choose = pick(
    "Measure",
    measures.map((m) => [m, measureName(m)]),
    "loss",
    show,
  );
  const alone = groups.some((_, g) => firstRun(g).alone)
    ? " In a run of `Alone` each client is measured at its own model, so it is left out of that."
    : "";
  const spread = seeds > 1 ? "; mean ± standard deviation over seeds" : "";
  const node = [
    el("h3", {}, "Where each run ended"),
    el(
      "p",
      { class: "say" },
      prose(
        comparable
          ? `The best of each column is bold, with what is within one percent of it${spread}.${alone}`
          : `${whyApart()}, so none is marked as the best${spread}.`,
      ),
    ),
    el("div", { class: "controls" }, choose.node),
    box,
  ];
  show("loss");
  return node;
}
