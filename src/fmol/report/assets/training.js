// What happened round by round: losses, weights, the direction, and objectives against one another.

// ---- losses ----------------------------------------------------------------------------------

const MOST_PANELS = 12;
/** Panels of loss against rounds or megabytes: one with all objectives, or one per objective with all runs. */
function lossPanels(measure, view, x, look) {
  const chosen = visibleObjectives(),
    drawn = visibleGroups();
  if (!chosen.length) return NONE_SHOWN;
  if (comparing && !drawn.length) return NO_RUN_SHOWN;
  const sent = (g) =>
    x !== "MB" || groups[g].runs.some((r) => (last(runs[r].up) || 0) + (last(runs[r].down) || 0) > 0);
  const line = (g, s) => ({
    ...lossOf(groups[g], s, measure, x),
    name: comparing ? groups[g].label : objectives[s],
  });
  let result;
  if (single) {
    result = [
      {
        series: chosen
          .filter(() => sent(0))
          .map((s) => ({
            ...line(0, s),
            color: ofObjective(s, look),
            dash: dash(s, objectives.length),
            keys: objectiveKeys(s),
          })),
      },
    ];
  } else if (view === "each") {
    result = chosen.slice(0, MOST_PANELS).map((s) => ({
      title: objectives[s],
      series: drawn.filter(sent).map((g) => ({
        ...line(g, s),
        color: ofGroup(g, look),
        dash: dash(g, groups.length),
        keys: { ...objectiveKeys(s), ...groupKeys(g) },
      })),
    }));
  } else {
    const relative = measure.endsWith("loss"),
      worstIs = betterOf(measure) === "higher" ? Math.min : Math.max;
    const fold = (g, how) => {
      const rows = chosen
        .filter((s) => !relative || !fromZero(s, measure))
        .map((s) => line(g, s).points)
        .filter((p) => p.length);
      const table = new Map();
      for (const points of rows)
        for (const [at, v, round] of points) {
          const entry = table.get(round) || { x: at, values: [] };
          entry.values.push(relative && points[0][1] > 0 ? v / points[0][1] : v);
          table.set(round, entry);
        }
      return [...table]
        .filter(([, e]) => e.values.length === rows.length)
        .map(([round, e]) => [e.x, how(e.values), round]);
    };
    const of = relative ? `${measureName(measure)} ÷ that at round 0` : measureName(measure);
    result = [
      ["mean over objectives", mean],
      ["worst objective", (v) => worstIs(...v)],
    ].map(([title, how]) => ({
      title: `${title}: ${of}`,
      series: drawn.filter(sent).map((g) => ({
        name: groups[g].label,
        points: fold(g, how),
        color: ofGroup(g, look),
        dash: dash(g, groups.length),
        keys: groupKeys(g),
      })),
    }));
  }
  result.forEach((p) => {
    p.series = p.series.filter((s) => s.points.length);
  });
  return result.filter((p) => p.series.length);
}

function lossCard(id, title, x, say) {
  const state = {
    measure: "loss",
    axis: "log",
    view: comparing && comparable && objectives.length > MOST_PANELS ? "all" : "each",
  };
  const controls = [];
  if (measures.length > 1)
    controls.push(
      pick(
        "Measure",
        measures.map((m) => [m, measureName(m)]),
        "loss",
        (v) => {
          state.measure = v;
          redraw(id)();
        },
      ),
    );
  controls.push(
    choice(
      "Vertical axis",
      [
        ["log", "log"],
        ["linear", "linear"],
      ],
      state.axis,
      (v) => {
        state.axis = v;
        redraw(id)();
      },
    ),
  );
  // A mean over other objectives is another quantity.
  if (comparable && comparing && objectives.length > 1)
    controls.push(
      choice(
        "Objectives",
        [
          ["each", "each objective"],
          ["all", "mean and worst"],
        ],
        state.view,
        (v) => {
          state.view = v;
          redraw(id)();
        },
      ),
    );
  const hidden = () =>
    state.view === "each" && comparing && visibleObjectives().length > MOST_PANELS
      ? ` The first ${MOST_PANELS} chosen objectives of ${visibleObjectives().length} are drawn.`
      : "";
  return makeCard({
    id,
    title,
    wide: true,
    controls,
    say: () => say(state) + hidden(),
    draw(width, look, exporting) {
      const found = lossPanels(state.measure, state.view, x, look);
      if (typeof found === "string") return found;
      if (!found.length)
        return x === "MB"
          ? "Nothing was sent in these runs, so there is no traffic to compare with."
          : `No ${measureName(state.measure)} was measured for what is chosen.`;
      const positive = found.some((p) => p.series.some((s) => s.points.some((q) => q[1] > 0)));
      const word =
        comparing && state.view === "all"
          ? state.measure.endsWith("loss")
            ? "ratio to round 0"
            : "value"
          : measureName(state.measure);
      return drawLines(
        {
          title,
          label: `${title}: ${measureName(state.measure)}`,
          panels: found,
          x:
            x === "MB"
              ? { label: "communication, up and down (MB)", word: "MB", min: 0 }
              : { label: "round", whole: true },
          y: { label: word, log: state.axis === "log" && positive },
        },
        width,
        look,
        exporting,
      );
    },
  });
}

/** Which objectives are in no ratio to their start, as a sentence to append. */
function leftOut(measure = "loss") {
  const those = visibleObjectives().filter((s) => measure.endsWith("loss") && fromZero(s, measure));
  return those.length ? ` Left out: ${listedCode(those.map((s) => objectives[s]))}, which began near zero.` : "";
}
function losses() {
  const sampled = runs.filter((r) => r.sampled);
  const evaluated = [...new Set(runs.map((r) => r.evaluated).filter(Boolean))];
  const over = evaluated.length ? `Training losses are over ${listed(evaluated)}` : "";
  const lead = [
    over ? over + ", at the model the round begins with." : "",
    sampled.length
      ? `Of ${whole(Math.max(...sampled.map((r) => r.done)))} rounds ${whole(sampled[0].t.length)} are drawn, evenly spread.`
      : "",
  ]
    .filter(Boolean)
    .join(" ");
  section(
    "losses",
    "Losses",
    lead,
    lossCard("losses", "Loss over rounds", "round", (state) => {
      const way =
        betterOf(state.measure) === "lower"
          ? "Lower is better"
          : betterOf(state.measure) === "higher"
            ? "Higher is better"
            : "Each line is one value over rounds";
      const rest = comparing
        ? " Each panel is an objective, each line a run."
        : manyObjectives
          ? " Each line is an objective; point at one to pick it out."
          : " Each line is an objective.";
      return (
        way +
        "." +
        (comparing && state.view === "all"
          ? ` All chosen objectives in one number, each run a line.${leftOut(state.measure)}`
          : rest) +
        (state.axis === "log" ? " On the log axis equal heights are equal ratios." : "") +
        (comparing && state.view === "all" ? "" : bandWords)
      );
    }),
  );
}

// ---- weights and direction -------------------------------------------------------------------

/** That a protected objective's weight is no pull, where there is one. */
function sparedWords(group) {
  const those = visibleObjectives().filter((s) => group.runs.some((r) => runs[r].protected[s]));
  return those.length
    ? ` While ${listedCode(those.map((s) => objectives[s]))} ${those.length > 1 ? "were" : "was"} protected the weight is that of a constraint, not of a pull.`
    : "";
}
function weightsCard() {
  const id = "weights",
    state = { group: 0, view: manyObjectives ? "map" : "stack" };
  // Weights that are found are more to look at than weights that are given.
  state.group = Math.max(
    0,
    [(g) => firstRun(g).scalars.gap, (g) => !firstRun(g).alone]
      .map((wanted) => groups.findIndex((_, g) => wanted(g)))
      .find((g) => g >= 0) ?? 0,
  );
  const controls = [
    choice(
      "Kind of chart",
      [
        ["stack", "stacked"],
        ["lines", "lines"],
        ["map", "map"],
      ],
      state.view,
      (v) => {
        state.view = v;
        redraw(id)();
      },
    ),
  ];
  if (comparing)
    controls.unshift(
      pick("Run", groupOptions(), state.group, (v) => {
        state.group = Number(v);
        redraw(id)();
      }),
    );
  return makeCard({
    id,
    title: "Weights λ over rounds",
    wide: true,
    controls,
    say: () =>
      ({
        stack:
          "How much each objective counts in the direction of a round: the weights add up to one, so a wide band is an objective that decides.",
        lines: "How much each objective counts in the direction of a round.",
        map: "Each row is an objective, each column a round: the darker, the more it counts in the direction.",
      })[state.view].replace("darker", theme().name === "dark" ? "brighter" : "darker") +
      (groups[state.group].runs.length > 1 ? " Means over seeds." : "") +
      sparedWords(groups[state.group]),
    draw(width, look, exporting) {
      const group = groups[state.group],
        run = firstRun(state.group),
        chosen = visibleObjectives().filter((s) => has(run, s));
      if (!chosen.length) return NONE_SHOWN;
      if (run.alone) return "With `Alone` every client follows its own objectives; no weights are shared.";
      const lines = chosen.map((s) => ({ s, ...gather(group, (r) => [r.t, r.weights[s]]) }));
      const rounds = [...new Set(lines.flatMap((l) => l.points.map((p) => p[2])))].sort((a, b) => a - b);
      if (!rounds.length) return "No round was run, so there are no weights.";
      const title = `Weights λ over rounds${comparing ? `: ${group.label}` : ""}`;
      if (state.view === "lines")
        return drawLines(
          {
            title,
            panels: [
              {
                series: lines.map((l) => ({
                  ...l,
                  name: objectives[l.s],
                  color: ofObjective(l.s, look),
                  dash: dash(l.s, objectives.length),
                  keys: objectiveKeys(l.s),
                })),
              },
            ],
            x: { label: "round", whole: true },
            y: { label: "weight λ", zero: true },
          },
          width,
          look,
          exporting,
        );
      const values = lines.map((l) => {
        const at = new Map(l.points.map((p) => [p[2], p[1]]));
        return rounds.map((t) => (at.has(t) ? at.get(t) : null));
      });
      if (state.view === "stack")
        return drawStack(
          {
            title,
            rounds,
            x: { label: "round" },
            y: { label: "weight λ" },
            series: lines.map((l, i) => ({
              name: objectives[l.s],
              color: ofObjective(l.s, look),
              values: values[i],
              keys: objectiveKeys(l.s),
            })),
          },
          width,
          look,
          exporting,
        );
      const bucket = Math.ceil(rounds.length / 80),
        columns = [];
      for (let i = 0; i < rounds.length; i += bucket) columns.push(i);
      const cell = (r, c) => {
        const part = values[r].slice(columns[c], columns[c] + bucket).filter(known);
        return part.length ? mean(part) : null;
      };
      const most = Math.max(...values.flat().filter(known), 1e-9);
      return drawHeat(
        {
          title,
          rows: chosen.map((s) => (manyObjectives ? `${s + 1} ${objectives[s]}` : objectives[s])),
          columns: columns.map((i) => String(rounds[i])),
          sequence: bucket,
          widest: 40,
          columnLabel: bucket > 1 ? `round (means of ${bucket} rounds)` : "round",
          value: cell,
          color: (v, l) => amount(Math.sqrt(v / most), l),
          keys: (r) => objectiveKeys(chosen[r]),
          key: { from: 0, to: 1, value: (p) => p * p * most, ends: ["0", fmt(most, 3)], words: "weight λ" },
          tip: (r, c) => ({
            title: `round ${rounds[columns[c]]}`,
            rows: [
              { name: objectives[chosen[r]], text: fmt(cell(r, c)), color: ofObjective(chosen[r], look) },
            ],
          }),
        },
        width,
        look,
        exporting,
      );
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
  const have = measured(keys),
    state = { axis: log ? "log" : "linear", key: have[0] };
  const controls = [];
  if (have.length && log)
    controls.push(
      choice(
        "Vertical axis",
        [
          ["log", "log"],
          ["linear", "linear"],
        ],
        state.axis,
        (v) => {
          state.axis = v;
          redraw(id)();
        },
      ),
    );
  if (comparing && have.length > 1)
    controls.push(
      pick(
        "Quantity",
        have.map((k) => [k, QUANTITIES[k][0]]),
        state.key,
        (v) => {
          state.key = v;
          redraw(id)();
        },
      ),
    );
  return makeCard({
    id,
    title,
    controls,
    say: () => (have.length ? say() + bandWords : ""),
    draw(width, look, exporting) {
      if (!have.length) return none;
      const series = single
        ? have.map((key, i) => ({
            ...gather(groups[0], (r) => [r.t, r.scalars[key]]),
            name: QUANTITIES[key][0],
            color: EIGHT[look.name][i],
            dash: DASHES[i],
            keys: { "data-measure": key },
          }))
        : visibleGroups().map((g) => ({
            ...gather(groups[g], (r) => [r.t, r.scalars[state.key]]),
            name: groups[g].label,
            color: ofGroup(g, look),
            dash: dash(g, groups.length),
            keys: groupKeys(g),
          }));
      const good = series.filter((s) => s.points.length);
      if (!good.length) return comparing ? "Not measured in the runs that are chosen." : none;
      const logged = state.axis === "log" && good.some((s) => s.points.some((p) => p[1] > 0));
      return drawLines(
        {
          title: comparing ? `${title}: ${QUANTITIES[state.key][0]}` : title,
          panels: [{ series: good }],
          x: { label: "round", whole: true },
          y: { label: comparing ? QUANTITIES[state.key][1] : y, log: logged, ...range },
        },
        width,
        look,
        exporting,
      );
    },
  });
}

const noUpdates = () => {
  if (runs.every((r) => !r.done)) return "No round was run, so there is nothing to show here.";
  const names = [...new Set(runs.map((r) => r.algorithm))];
  return names.some((n) => n === "FedAvg" || n === "Alone")
    ? `${listed(names.map((n) => `\`${n}\``))} ${names.length > 1 ? "train" : "trains"} one mixture of the objectives, so there is no update per objective, and nothing to show here.`
    : "Not measured in any round.";
};

function direction() {
  const gaps = runs.flatMap((r) => r.scalars.gap || []).filter(known);
  // Within the solver's tolerance differences are rounding: on an axis of their own they would look like news.
  const tolerance = 1e-9,
    flat = gaps.length && gaps.every((v) => Math.abs(v) <= tolerance);
  const gapWords = !gaps.length
    ? ""
    : flat
      ? ` It holds in every round, to rounding (largest gap ${fmt(Math.max(...gaps), 2)}); the axis spans the tolerance.`
      : ` The largest here is ${fmt(Math.max(...gaps), 2)}.`;
  const given = groups.filter((_, g) => !firstRun(g).finds_weights);
  const lead =
    given.length === groups.length
      ? "Here the objectives' weights are given, not found from round to round."
      : "Each round weighs the objectives' updates so that they add up to one direction that helps every objective at once." +
        (given.length ? ` In ${listedCode(given.map((g) => g.label))} the weights are given instead.` : "");
  section(
    "direction",
    "Weights and direction",
    lead,
    weightsCard(),
    grid(
      scalarCard({
        id: "stationarity",
        title: "How far from stationary",
        keys: ["direction", "true_direction", "stationarity", "optimality_gap"],
        log: true,
        y: "squared length",
        say: () =>
          `Near zero, no step improves all objectives.${measured(["stationarity"]).length ? " ‖d*‖² on true gradients is the paper's measure with the best weights." : " True gradients were not asked for, so only the direction taken is drawn."}`,
        none: noUpdates(),
      }),
      scalarCard({
        id: "certificate",
        title: "The certificate",
        keys: ["gap"],
        y: "gap",
        range: flat ? { min: -tolerance, max: tolerance } : {},
        say: () =>
          `How far a round's weights miss the condition ⟨Δₛ, d⟩ ≥ ‖d‖², as a part of ‖d‖²: zero or below means that every objective is helped as the proof asks.${gapWords}`,
        none: noUpdates(),
      }),
    ),
  );
}

// ---- radar and trade-off ---------------------------------------------------------------------

const lossTables = new Map();
/** Mean loss of an objective in a group at a round, or at the last one measured before it. */
function lossAt(g, s, round) {
  const key = `${g}:${s}`;
  if (!lossTables.has(key)) lossTables.set(key, lossOf(groups[g], s, "loss").points);
  let found = null;
  for (const [, v, at] of lossTables.get(key))
    if (at <= round) found = v;
    else break;
  return found;
}
function radarCard() {
  const id = "radar";
  const rounds = [
    ...new Set(
      groups.flatMap((g) => objectives.flatMap((_, s) => lossOf(g, s, "loss").points.map((p) => p[2]))),
    ),
  ].sort((a, b) => a - b);
  const end = Math.max(rounds.length - 1, 0),
    quarter = Math.floor(end / 4);
  const state = { kept: single && end > 3 ? [...new Set([0, quarter])] : [0], axis: "linear" };
  const slider = slide(single ? "Round" : "At round", rounds, end, redraw(id));
  const keep = el(
    "button",
    {
      type: "button",
      class: "small",
      onclick: () => {
        if (!state.kept.includes(slider.at)) state.kept = [...state.kept, slider.at].slice(-6);
        redraw(id)();
      },
    },
    "keep this round",
  );
  const drop = el(
    "button",
    {
      type: "button",
      class: "small",
      onclick: () => {
        state.kept = [];
        redraw(id)();
      },
    },
    "drop kept",
  );
  const rated = () => visibleObjectives().filter((s) => !fromZero(s));
  const few = () => rated().length < 3;
  const ends = groups
    .flatMap((_, g) => falls(g))
    .filter(known)
    .sort((a, b) => a - b);
  if (ends.length && (ends[ends.length - 1] > 3 || (ends[0] > 0 && ends[Math.floor(ends.length / 2)] < 0.05)))
    state.axis = "log";
  const controls = [
    choice(
      "Scale",
      [
        ["linear", "linear"],
        ["log", "log"],
      ],
      state.axis,
      (v) => {
        state.axis = v;
        redraw(id)();
      },
    ),
  ];
  if (rounds.length > 1) {
    controls.push(slider);
    if (single) controls.push(keep, drop);
  }
  return makeCard({
    id,
    title: "Losses beside one another",
    controls,
    say: () =>
      `Each loss divided by what it was at round ${rounds.length ? rounds[0] : 0}, so 1 is where training began.${leftOut()} ${few() ? "The further left, the better." : "The smaller the shape, the better; a dent is an objective that gained more than the others."}${visibleObjectives().length > 12 ? " Spokes are numbered; point at one for its name." : ""}`,
    draw(width, look, exporting) {
      const chosen = rated();
      if (!visibleObjectives().length) return NONE_SHOWN;
      if (!rounds.length) return "No training loss was measured.";
      const base = (g, s) => lossAt(g, s, rounds[0]);
      if (groups.every((_, g) => chosen.every((s) => !(base(g, s) > 0))))
        return "The losses at the start are unknown, near zero or not positive, so nothing can be divided by them.";
      const ratio = (g, s, t) => {
        const b = base(g, s),
          v = lossAt(g, s, t);
        return known(b) && b > 0 && known(v) ? v / b : null;
      };
      let shapes;
      if (single) {
        const kept = [...new Set([...state.kept, slider.at])].sort((a, b) => a - b);
        shapes = kept.map((k, i) => ({
          name: `round ${rounds[k]}`,
          color: EIGHT[look.name][k === slider.at ? 1 : [0, 2, 3, 4, 5, 6][i % 6]],
          dash: k === slider.at ? "" : DASHES[1 + (i % 3)],
          fill: k === slider.at ? 0.14 : 0,
          values: chosen.map((s) => ratio(0, s, rounds[k])),
          keys: { "data-round": rounds[k] },
        }));
      } else {
        shapes = visibleGroups().map((g) => ({
          name: groups[g].label,
          color: ofGroup(g, look),
          dash: dash(g, groups.length),
          fill: 0.05,
          values: chosen.map((s) => ratio(g, s, rounds[slider.at])),
          keys: groupKeys(g),
        }));
        if (!shapes.length) return NO_RUN_SHOWN;
      }
      const what = {
        title: comparing ? `Normalised losses at round ${rounds[slider.at]}` : "Normalised losses",
        spokes: chosen.map((s) => ({ name: objectives[s], number: s + 1 })),
        shapes,
        log: state.axis === "log",
        word: "loss ÷ loss at the start",
      };
      return chosen.length < 3
        ? drawDots(what, width, look, exporting)
        : drawRadar(what, width, look, exporting);
    },
    below: () =>
      visibleObjectives().length > 12
        ? el(
            "details",
            { class: "spokes" },
            el("summary", {}, "Which number is which objective"),
            el(
              "ol",
              {},
              visibleObjectives().map((s) => el("li", { value: s + 1 }, objectives[s])),
            ),
          )
        : null,
  });
}

function tradeCard() {
  const id = "trade-off",
    state = { x: 0, y: Math.min(1, objectives.length - 1), axis: "log", measure: "loss" };
  const options = objectives.map((name, s) => [s, name]);
  const controls =
    objectives.length > 1
      ? [
          pick("Across", options, state.x, (v) => {
            state.x = Number(v);
            redraw(id)();
          }),
          pick("Up", options, state.y, (v) => {
            state.y = Number(v);
            redraw(id)();
          }),
          ...(measures.length > 1
            ? [
                pick(
                  "Measure",
                  measures.map((m) => [m, measureName(m)]),
                  "loss",
                  (v) => {
                    state.measure = v;
                    redraw(id)();
                  },
                ),
              ]
            : []),
          choice(
            "Axes",
            [
              ["log", "log"],
              ["linear", "linear"],
            ],
            "log",
            (v) => {
              state.axis = v;
              redraw(id)();
            },
          ),
        ]
      : [];
  return makeCard({
    id,
    title: "Trade-off between two objectives",
    controls,
    say: () =>
      objectives.length > 1
        ? `One objective's ${measureName(state.measure)} against another's, a dot a round, from the ring to the big dot.${betterOf(state.measure) === "lower" ? " Towards the lower left both are better." : betterOf(state.measure) === "higher" ? " Towards the upper right both are better." : ""}`
        : "",
    draw(width, look, exporting) {
      if (objectives.length < 2) return "There is one objective, so nothing to trade.";
      const drawn = visibleGroups();
      if (!drawn.length) return NO_RUN_SHOWN;
      const paths = drawn
        .flatMap((g) =>
          groups[g].runs.map((r) => {
            const run = runs[r],
              table = tableOf(run, state.measure);
            const points = table
              ? run.at
                  .map((t, i) => [table[state.x][i], table[state.y][i], t])
                  .filter((p) => known(p[0]) && known(p[1]))
              : [];
            return {
              name: groups[g].label,
              color: single && groups[g].runs.length === 1 ? EIGHT[look.name][0] : ofGroup(g, look),
              dash: comparing ? dash(g, groups.length) : "",
              points,
              keys: groupKeys(g),
            };
          }),
        )
        .filter((p) => p.points.length);
      if (!paths.length) return `No ${measureName(state.measure)} was measured for both at the same round.`;
      const log = state.axis === "log" && paths.some((p) => p.points.some((q) => q[0] > 0 && q[1] > 0));
      const name = (s) => `${measureName(state.measure)}, ${cut(objectives[s], 200)}`;
      return drawPaths(
        {
          title: "Trade-off between two objectives",
          paths,
          x: { label: name(state.x), word: objectives[state.x], log },
          y: { label: name(state.y), word: objectives[state.y], log },
        },
        width,
        look,
        exporting,
      );
    },
  });
}
