// Between clients and server: conflict, communication and time.

// ---- conflict --------------------------------------------------------------------------------

function conflicts() {
  const rates = groups.map((g) => g.runs.map((r) => runs[r].conflict_rate).filter(known));
  const anyRate = rates.some((r) => r.length);
  const lead =
    objectives.length < 2
      ? "There is one objective, so no conflict."
      : !anyRate
        ? noUpdates()
        : single
          ? `In ${percent(mean(rates[0]))} of the rounds the plain mean of the updates would have hurt some objective: the conflict rate.`
          : `The conflict rate is the share of rounds in which the plain mean of the updates would have hurt some objective: ${listed(
              groups
                .map((g, i) => [g, rates[i]])
                .filter(([, r]) => r.length)
                .map(([g, r]) => `${percent(mean(r))} in \`${g.label}\``),
            )}.`;
  const able = runs.map((r, i) => i).filter((i) => runs[i].cosines.rounds.length);
  if (objectives.length > 1 && anyRate && !able.length) {
    section(
      "conflict",
      "Conflict between objectives",
      "In no round did two objectives have an update that could be compared, so whether they are in conflict is not known.",
    );
    return;
  }
  if (objectives.length < 2 || !anyRate) {
    section("conflict", "Conflict between objectives", lead);
    return;
  }
  const state = { key: "lowest", run: able[0] };
  const lines = makeCard({
    id: "cosines",
    title: "How opposed the updates are",
    controls: comparing
      ? [
          pick(
            "Quantity",
            [
              ["lowest", "most opposed pair of updates"],
              ["min_cosine", "worst update against the direction"],
            ],
            "lowest",
            (v) => {
              state.key = v;
              redraw("cosines")();
            },
          ),
        ]
      : [],
    say: () =>
      "A cosine of 1: two updates pull the same way; below 0: what helps one hurts the other. The direction itself should stay above 0 with every update." +
      bandWords,
    draw(width, look, exporting) {
      const get = (key) => (r) => [r.t, key === "lowest" ? r.lowest : r.scalars.min_cosine];
      const series = (
        single
          ? [
              ["lowest", "most opposed pair of updates"],
              ["min_cosine", "worst update against the direction"],
            ].map(([key, name], i) => ({
              ...gather(groups[0], get(key)),
              name,
              color: EIGHT[look.name][i],
              dash: DASHES[i],
              keys: { "data-measure": key },
            }))
          : visibleGroups().map((g) => ({
              ...gather(groups[g], get(state.key)),
              name: groups[g].label,
              color: ofGroup(g, look),
              dash: dash(g, groups.length),
              keys: groupKeys(g),
            }))
      ).filter((s) => s.points.length);
      if (!series.length) return "The runs that are chosen have no updates per objective, so no cosines.";
      return drawLines(
        {
          title: "How opposed the updates are",
          panels: [{ series }],
          x: { label: "round", whole: true },
          y: { label: "cosine", zero: true },
        },
        width,
        look,
        exporting,
      );
    },
  });
  const places = () => runs[state.run].cosines.rounds;
  const slider = slide("Round", places(), places().length - 1, () => redraw("pairs")());
  const controls = [slider];
  if (able.length > 1)
    controls.unshift(
      pick(
        "Run",
        able.map((i) => [i, `${runs[i].name}, seed ${runs[i].seed}`]),
        state.run,
        (v) => {
          state.run = Number(v);
          slider.reset(places(), places().length - 1);
          redraw("pairs")();
        },
      ),
    );
  const pairs = makeCard({
    id: "pairs",
    title: "Cosines between pairs of updates",
    controls,
    say: () =>
      `Blue: the two objectives pull together at this round; orange: against each other.${places().length < runs[state.run].done ? ` Kept for ${many(places().length, "round")}.` : ""}`,
    draw(width, look, exporting) {
      const table = runs[state.run].cosines,
        size = table.objectives.length,
        values = table.values[slider.at];
      const own = new Map(table.objectives.map((s, i) => [s, i])),
        chosen = visibleObjectives().filter((s) => own.has(s));
      if (chosen.length < 2) return "Choose at least two objectives in the bar above.";
      const cosine = (r, c) => {
        let [i, j] = [own.get(chosen[r]), own.get(chosen[c])];
        if (i === j) return null;
        if (i > j) [i, j] = [j, i];
        const v = values[i * size - (i * (i + 1)) / 2 + (j - i - 1)];
        return known(v) ? v / 1000 : null;
      };
      return drawHeat(
        {
          title: `Cosines between updates at round ${table.rounds[slider.at]}`,
          rows: chosen.map((s) => (manyObjectives ? `${s + 1} ${objectives[s]}` : objectives[s])),
          columns: chosen.map((s) => objectives[s]),
          square: true,
          widest: 62,
          value: cosine,
          color: (v, l) => balance(Math.sign(v) * Math.sqrt(Math.abs(v)), l),
          text: (v) => fmt(v, 2),
          key: { from: -1, to: 1, ends: ["−1 opposed", "1 together"], words: "cosine" },
          tip: (r, c) => ({
            title: `round ${table.rounds[slider.at]}`,
            rows: [
              {
                name: `${objectives[chosen[r]]} and ${objectives[chosen[c]]}`,
                text: r === c ? "itself" : fmt(cosine(r, c), 3),
              },
            ],
          }),
        },
        width,
        look,
        exporting,
      );
    },
  });
  section("conflict", "Conflict between objectives", lead, grid(lines, pairs));
}

// ---- communication and time ------------------------------------------------------------------

function communication() {
  const phases = [...new Set(runs.flatMap((r) => Object.keys(r.seconds)))];
  const per = (g, of) => mean(groups[g].runs.map((r) => of(runs[r]) || 0));
  const time = makeCard({
    id: "seconds",
    title: "Seconds by phase",
    say: () =>
      `Where the time went, all rounds together${seeds > 1 ? ", mean over seeds" : ""}. In a simulation the clients' seconds are spent one after the other.`,
    draw(width, look, exporting) {
      const rows = visibleGroups()
        .map((g) => ({
          name: groups[g].label,
          keys: groupKeys(g),
          parts: phases.map((p, i) => ({
            name: p,
            color: EIGHT[look.name][i % 8],
            value: per(g, (r) => r.seconds[p]),
          })),
        }))
        .filter((r) => r.parts.some((p) => p.value > 0));
      if (!rows.length) return "No seconds were recorded.";
      return drawBars({ title: "Seconds by phase", rows, x: { label: "seconds" } }, width, look, exporting);
    },
  });
  const rows = groups.map((group, g) => {
    const up = per(g, (r) => last(r.up)),
      down = per(g, (r) => last(r.down)),
      done = per(g, (r) => r.done);
    return el(
      "tr",
      {},
      el("th", { scope: "row" }, comparing ? swatchFor("run", g) : null, el("span", {}, group.label)),
      [fmt(up, 4), fmt(down, 4), fmt(up + down, 4), done ? fmt((up + down) / done, 3) : "–"].map((t) =>
        el("td", {}, t),
      ),
    );
  });
  section(
    "communication",
    "Communication and time",
    "Counts what training would send over a network; evaluating clients outside a cohort is not counted.",
    lossCard(
      "traffic",
      "Loss against communication",
      "MB",
      () =>
        `What a megabyte buys: all bytes sent so far, up and down, from left to right. A line further left is cheaper.${bandWords}`,
    ),
    grid(
      time,
      el(
        "div",
        { class: "card" },
        el("div", { class: "card-head" }, el("h3", {}, "Totals")),
        el("p", { class: "say" }, seeds > 1 ? "Means over seeds." : "All rounds together."),
        table(["run", "MB up", "MB down", "MB in all", "MB a round"], rows, "Communication in total"),
      ),
    ),
  );
}
