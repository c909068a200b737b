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
/** Objective → loss at the end divided by that at the start. */
const falls = (g) =>
  objectives.map((_, s) => {
    const start = starts(g, s, "loss"),
      end = finals(g, s, "loss");
    return start.length && end.length && mean(start) > 0 ? mean(end) / mean(start) : null;
  });

function summary() {
  if (single) {
    const ratios = falls(0)
      .map((v, s) => [v, s])
      .filter(([v]) => known(v))
      .sort((a, b) => a[0] - b[0]);
    if (!ratios.length) return "No training loss was measured at both ends of this run.";
    if (runs[0].done === 0) return "No round was run: these are the losses of the untrained model.";
    const fell = ratios.filter(([v]) => v < 1).length,
      words = ([v, s]) => {
        const change = v <= 1 ? `down ${percent(1 - v)}` : `up ${percent(v - 1)}`;
        return `\`${objectives[s]}\` (${fmt(mean(starts(0, s, "loss")), 3)} → ${fmt(mean(finals(0, s, "loss")), 3)}, ${change})`;
      };
    const all =
      fell === ratios.length
        ? fell === 1
          ? "The training loss fell"
          : fell === 2
            ? "The training loss fell for both objectives"
            : `The training loss fell for all ${fell} objectives`
        : `The training loss fell for ${fell} of ${ratios.length} objectives`;
    return ratios.length > 1
      ? `${all}: most for ${words(ratios[0])}, least for ${words(ratios[ratios.length - 1])}.`
      : `${all}: ${words(ratios[0])}.`;
  }
  const scores = groups
    .map((_, g) => [falls(g).filter(known), g])
    .filter(([v, g]) => v.length && !firstRun(g).alone)
    .map(([v, g]) => [mean(v), Math.max(...v), g]);
  if (!scores.length) return "No training loss was measured in these runs.";
  const best = [...scores].sort((a, b) => a[0] - b[0])[0],
    worst = [...scores].sort((a, b) => a[1] - b[1])[0];
  const worstOf = Math.max(...scores.map((s) => s[0]));
  if (scores.length > 1 && worstOf <= 1.01 * best[0])
    return `All runs end with about the same training loss: on average over objectives ${percent(best[0])} of where they started.`;
  const about = `\`${groups[best[2]].label}\` ends with the lowest training loss on average over objectives, ${percent(best[0])} of where it started`;
  return best[2] === worst[2]
    ? `${about}; its worst objective is also the best of all runs' worst, at ${percent(worst[1])}.`
    : `${about}; the worst-off objective does best in \`${groups[worst[2]].label}\`, at ${percent(worst[1])}.`;
}

function headline() {
  const portrait = data.portraits[0],
    tile = (name, value, note) =>
      el(
        "div",
        { class: "tile" },
        el("span", {}, name),
        el("b", {}, value),
        note ? el("small", {}, note) : null,
      );
  const done = [...new Set(runs.map((r) => r.done))].sort((a, b) => a - b);
  const tiles = [
    tile("rounds", done.length > 1 ? `${whole(done[0])}–${whole(done[done.length - 1])}` : whole(done[0])),
    tile("clients", whole(portrait.size)),
    tile("objectives", whole(objectives.length)),
    tile("model", portrait.model, `${whole(portrait.parameters)} parameters`),
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

  const words = [];
  const multiple = runs.length > 1;
  const who = (run, r) => (multiple ? [el("b", {}, `${run.name}, seed ${run.seed}`), ": "] : []);
  const stops = new Map();
  runs.forEach((run) => {
    const text = run.finished
      ? `Ended after ${many(run.done, "round")}: ${run.stopped || "no reason was recorded"}.`
      : `This run has not ended: ${many(run.done, "round")} so far, and the trained model was not evaluated.`;
    stops.set(text, [...(stops.get(text) || []), run]);
  });
  for (const [text, those] of stops) {
    const kind = those[0].finished ? "quiet" : "warn";
    words.push(
      el(
        "li",
        { class: kind },
        multiple && stops.size > 1
          ? [
              el(
                "b",
                {},
                those.length > 3
                  ? `${those.length} of ${runs.length} runs`
                  : listed(those.map((r) => `${r.name}, seed ${r.seed}`)),
              ),
              ": ",
            ]
          : [],
        prose(text),
      ),
    );
  }
  let alarms = 0;
  runs.forEach((run, r) => {
    for (const alarm of run.alarms) {
      alarms += 1;
      const when = alarm.stands
          ? `since round ${alarm.since}, until the end`
          : `rounds ${alarm.since} to ${alarm.until}`,
        times = alarm.times > 1 ? `, the last of ${alarm.times} times` : "";
      words.push(
        el(
          "li",
          { class: "alarm" },
          who(run, r),
          el("b", {}, `Alarm, ${alarm.kind}`),
          ` (${when}${times}): `,
          prose(alarm.message),
        ),
      );
    }
    if (run.refused.count) {
      words.push(
        el(
          "li",
          { class: "warn" },
          who(run, r),
          el("b", {}, `${many(run.refused.count, "refusal")}. `),
          el(
            "details",
            {},
            el("summary", {}, "What and why"),
            el(
              "ul",
              {},
              run.refused.first.map((text) => el("li", {}, prose(text))),
            ),
            run.refused.count > run.refused.first.length
              ? `… ${run.refused.count - run.refused.first.length} more`
              : "",
          ),
        ),
      );
    }
    for (const fact of [...run.facts, ...run.notes])
      words.push(el("li", { class: "note" }, who(run, r), prose(fact)));
  });
  if (!alarms) words.push(el("li", { class: "quiet" }, "No alarm stood at any time."));

  section(
    "overview",
    "At a glance",
    summary(),
    el("div", { class: "tiles" }, tiles),
    el("ul", { class: "words" }, words),
    single ? finalTable() : compareTable(),
  );
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
    const change = start.length && end.length && mean(start) > 0 ? mean(end) / mean(start) - 1 : null;
    const weights = groups[0].runs.flatMap((r) => runs[r].weights[s].filter(known));
    const goal = targets[name];
    return el(
      "tr",
      {},
      el("th", { scope: "row" }, swatchFor("objective", s), el("span", {}, name)),
      [
        spreadOf(start),
        spreadOf(end),
        known(change) ? (change > 0 ? "+" : "") + percent(change) : "–",
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
  const note = groups[0].runs.length > 1 ? "Mean ± standard deviation over seeds." : "";
  return [
    el("h3", {}, "Where each objective ended"),
    note ? el("p", { class: "say" }, note) : null,
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
      if (k.length < 2 || !(lower || higher)) return found.map(() => false);
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
    const head = ["run", "seeds", "rounds", ...(objectives.length > 1 ? ["mean of all"] : []), ...objectives];
    const rows = groups.map((group, g) =>
      el(
        "tr",
        {},
        el("th", { scope: "row" }, swatchFor("run", g), el("span", {}, group.label)),
        el("td", {}, whole(group.runs.length)),
        el("td", {}, listed([...new Set(group.runs.map((r) => whole(runs[r].done)))])),
        objectives.length > 1
          ? el("td", { class: boldAll[g] ? "best" : null }, fmt(overall(means[g])))
          : null,
        objectives.map((_, s) => el("td", { class: bold[s][g] ? "best" : null }, spreadOf(values[g][s]))),
      ),
    );
    box.replaceChildren(table(head, rows, "Final values by run"));
    fillSwatches();
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
  const node = [
    el("h3", {}, "Where each run ended"),
    el(
      "p",
      { class: "say" },
      prose(
        `The best of each column is bold, with what is within one percent of it${seeds > 1 ? "; mean ± standard deviation over seeds" : ""}.${alone}`,
      ),
    ),
    el("div", { class: "controls" }, choose.node),
    box,
  ];
  show("loss");
  return node;
}
