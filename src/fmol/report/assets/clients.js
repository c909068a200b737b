// Who has what, and what each client gets.

// ---- who has what ----------------------------------------------------------------------------

/** How many samples of a client have a label of its portrait's objective `s`; null where that is not known. */
const labelsOf = (client, s) => {
  const at = client.holds.indexOf(s);
  return at < 0 ? null : client.labelled[at];
};
const isPartly = (client, s) => {
  const n = labelsOf(client, s);
  return known(n) && (n === 0 || (known(client.samples) && n !== client.samples));
};
function labelWords(portrait) {
  const of = (test) => portrait.clients.some((c) => portrait.objectives.some((_, s) => test(c, s)));
  return [
    of(isPartly) ? " Numbers are its samples with a label of the objective." : "",
    of((c, s) => labelsOf(c, s) === 0)
      ? " Grey: it holds the objective but has no label of it, so it takes no part in it."
      : "",
  ].join("");
}
/** The first three of some names, and how many more there are. */
const few = (names) =>
  listed(names.length > 4 ? [...names.slice(0, 3), `${names.length - 3} more`] : names);

function holdings() {
  const portraits = data.portraits,
    ofPortrait = (p) =>
      few(groups.filter((g) => g.runs.some((r) => runs[r].portrait === p)).map((g) => g.label));
  const federations = portraits.map((_, p) => [p, `${p + 1}: ${ofPortrait(p)}`]);
  const some = (p) =>
    p.size > p.clients.length
      ? ` ${whole(p.clients.length)} of ${whole(p.size)} clients are drawn, evenly spread.`
      : "";
  const inWords = (p) =>
    `${many(p.size, "client")}, ${many(p.objectives.length, "objective")}${known(p.held_out) ? `, and ${many(p.held_out, "sample")} held out at the server` : ""}.`;
  const one = { at: 0 },
    two = { at: Math.max(0, portraits.findIndex((p) => Object.keys(p.labels).length)) };
  two.column = Object.keys(portraits[two.at].labels)[0];
  const first = makeCard({
    id: "holdings",
    title: "Which client holds which objective",
    controls:
      portraits.length > 1
        ? [
            pick("Federation", federations, 0, (v) => {
              one.at = Number(v);
              redraw("holdings")();
            }),
          ]
        : [],
    say: () =>
      `A filled cell: the client trains for that objective (the matrix A).${labelWords(portraits[one.at])}${portraits[one.at].clients.some((c) => known(c.samples)) ? " Bars are its training samples." : ""}${some(portraits[one.at])}`,
    draw(width, look, exporting) {
      const p = portraits[one.at],
        chosen = visibleObjectives().filter((s) => p.objectives.includes(objectives[s]));
      if (!chosen.length) return NONE_SHOWN;
      const holds = (r, s) => p.clients[r].holds.includes(p.objectives.indexOf(objectives[s]));
      const known_ = p.clients.some((c) => known(c.samples)),
        partly = p.clients.some((c) => p.objectives.some((_, s) => isPartly(c, s)));
      // Samples with a label; where all have one, that it is held.
      const count = (r, c) => labelsOf(p.clients[r], p.objectives.indexOf(objectives[chosen[c]]));
      const share = (r, c) => {
        if (!holds(r, chosen[c])) return null;
        const n = count(r, c);
        if (!known(n)) return 1;
        return n && known(p.clients[r].samples) ? Math.min(1, n / p.clients[r].samples) : n && 1;
      };
      return drawHeat(
        {
          title: "Which client holds which objective",
          rows: p.clients.map((c) => c.id),
          columns: chosen.map((s) => objectives[s]),
          rowLabel: "client",
          widest: 110,
          columnLabel: chosen.length > 12 ? "objective (by number where narrow)" : "objective",
          value: share,
          color: (v, l) => (v ? amount(0.2 + 0.55 * v, l) : l.grid),
          text: partly ? (v, r, c) => (known(count(r, c)) ? whole(count(r, c)) : "") : null,
          keys: (r, c) => objectiveKeys(chosen[c]),
          bars: known_ ? { label: "samples", values: p.clients.map((c) => c.samples) } : null,
          tip: (r, c) => ({
            title: p.clients[r].id,
            rows: [
              {
                name: objectives[chosen[c]],
                text: !holds(r, chosen[c])
                  ? "not held"
                  : count(r, c) === 0
                    ? "held, without a label"
                    : "held",
              },
              ...(isPartly(p.clients[r], p.objectives.indexOf(objectives[chosen[c]]))
                ? [{ name: "samples with a label", text: whole(count(r, c)) }]
                : []),
              { name: "training samples", text: whole(p.clients[r].samples) },
              ...(known(p.clients[r].held_out)
                ? [{ name: "held-out samples", text: whole(p.clients[r].held_out) }]
                : []),
            ],
          }),
        },
        width,
        look,
        exporting,
      );
    },
  });
  const columns = [...new Set(portraits.flatMap((p) => Object.keys(p.labels)))];
  const controls = [];
  if (portraits.length > 1)
    controls.push(
      pick("Federation", federations, two.at, (v) => {
        two.at = Number(v);
        redraw("labels")();
      }),
    );
  if (columns.length > 1)
    controls.push(
      pick(
        "Labels of",
        columns.map((c) => [c, c]),
        two.column,
        (v) => {
          two.column = v;
          redraw("labels")();
        },
      ),
    );
  const second = makeCard({
    id: "labels",
    title: "Which labels a client has",
    controls,
    say: () =>
      columns.length
        ? `Training samples per label of \`${two.column}\`. Even rows: all clients see the same; a few filled cells a row: each client knows some labels only.${some(portraits[two.at])}`
        : "",
    draw(width, look, exporting) {
      const p = portraits[two.at],
        labels = p.labels[two.column];
      if (!labels)
        return "The targets are not labels (few distinct whole numbers), or the data come only when they are needed; so there is nothing to count.";
      const count = (r, c) => (p.clients[r].labels[two.column] || [])[c],
        most = Math.max(...p.clients.flatMap((c) => c.labels[two.column] || [0]), 1);
      return drawHeat(
        {
          title: `Samples per label of ${two.column}`,
          rows: p.clients.map((c) => c.id),
          columns: labels,
          rowLabel: "client",
          columnLabel: "label",
          value: (r, c) => {
            const n = count(r, c);
            return n ? n : null;
          },
          color: (v, l) => amount(0.12 + 0.88 * (v / most), l),
          text: (v) => whole(v),
          bars: p.clients.some((c) => known(c.samples))
            ? { label: "samples", values: p.clients.map((c) => c.samples) }
            : null,
          key: { from: 0, to: most, ends: ["0", whole(most)], words: "samples" },
          tip: (r, c) => ({
            title: p.clients[r].id,
            rows: [
              { name: `label ${labels[c]}`, text: whole(count(r, c) || 0) },
              { name: "all samples", text: whole(p.clients[r].samples) },
            ],
          }),
        },
        width,
        look,
        exporting,
      );
    },
  });
  section(
    "holdings-section",
    "Who has what",
    portraits.length === 1
      ? inWords(portraits[0])
      : portraits.length > 3
        ? `The runs are on ${portraits.length} federations; choose one at each chart.`
        : portraits.map((p, i) => `Federation ${federations[i][1]}: ${inWords(p)}`).join(" "),
    grid(first, second),
  );
}

// ---- clients ---------------------------------------------------------------------------------

function clientsCards() {
  const able = runs.map((r, i) => i).filter((i) => runs[i].clients);
  const own = able.find((i) => !runs[i].alone);
  const state = {
    run: own === undefined ? able[0] : own,
    measure: "loss",
    view: data.alone.length && own !== undefined ? "gain" : "value",
  };
  const metrics = [
    ...new Set(
      [...able.map((i) => runs[i].clients), ...data.alone.map((a) => a.clients)].flatMap((c) =>
        Object.keys(c.held_out),
      ),
    ),
  ];
  const all = ["loss", ...metrics.map((m) => `held_out:${m}`)];
  const shared = metrics.filter(
    (m) =>
      own !== undefined && runs[own].clients.held_out[m] && data.alone.some((a) => a.clients.held_out[m]),
  );
  // Learning one's own data by heart is no gain: where there are held-out values they come first.
  if (state.view === "gain" && shared.length) state.measure = `held_out:${shared[0]}`;
  const both = () => {
    redraw("clients")();
    redraw("spread")();
  };
  const controls = [];
  if (able.length > 1)
    controls.push(
      pick(
        "Run",
        able.map((i) => [i, `${runs[i].name}, seed ${runs[i].seed}`]),
        state.run,
        (v) => {
          state.run = Number(v);
          both();
        },
      ),
    );
  if (all.length > 1)
    controls.push(
      pick(
        "Measure",
        all.map((m) => [m, measureName(m)]),
        state.measure,
        (v) => {
          state.measure = v;
          both();
        },
      ),
    );
  if (data.alone.length)
    controls.push(
      choice(
        "Show",
        [
          ["value", "value"],
          ["gain", "gain over alone"],
          ["ratio", "ratio to alone"],
        ],
        state.view,
        (v) => {
          state.view = v;
          both();
        },
      ),
    );
  const from = (clients) =>
    state.measure === "loss" ? clients.loss : clients.held_out[state.measure.slice(9)];
  const way = () =>
    betterOf(state.measure) || (/accuracy|auc|f1|score/i.test(state.measure) ? "higher" : "lower");
  const prepare = () => {
    const run = runs[state.run];
    if (!run) return null;
    const mine = from(run.clients);
    const other = data.alone.find((a) => a.seed === run.seed) || data.alone[0];
    const theirs = other && from(other.clients),
      place = other ? new Map(other.clients.ids.map((c, i) => [c, i])) : new Map();
    const value = (r, s) => (mine ? mine[r][s] : null);
    const alone = (r, s) => {
      const i = place.get(run.clients.ids[r]);
      return theirs && i !== undefined ? theirs[i][s] : null;
    };
    const sign = way() === "lower" ? -1 : 1;
    const gain = (r, s) => {
      const a = value(r, s),
        b = alone(r, s);
      return known(a) && known(b) ? sign * (a - b) : null;
    };
    const ratio = (r, s) => {
      const a = value(r, s),
        b = alone(r, s);
      return known(a) && known(b) && b > 0 && a > 0 ? a / b : null;
    };
    const plain = state.view === "value" || run.alone;
    return {
      run,
      value,
      alone,
      gain,
      ratio,
      sign,
      other,
      plain,
      ids: run.clients.ids,
      cell: plain ? value : state.view === "gain" ? gain : ratio,
    };
  };
  const nothing = (now) =>
    now.plain
      ? `No ${measureName(state.measure)} of a single client was recorded.`
      : `There is no ${measureName(state.measure)} of the same clients alone to compare with.`;
  const quantity = (now) =>
    now.plain
      ? measureName(state.measure)
      : state.view === "ratio"
        ? `${measureName(state.measure)} ÷ alone`
        : `gain in ${measureName(state.measure)}`;
  const when = (now) => {
    const [a, b] = now.run.clients.rounds;
    return a === b ? `at round ${a}` : `as last measured, between rounds ${a} and ${b}`;
  };

  const heat = makeCard({
    id: "clients",
    title: "Every client and objective",
    wide: manyObjectives,
    controls,
    say() {
      const now = prepare();
      if (!now) return "";
      const part =
        now.run.clients.total > now.ids.length
          ? ` ${now.ids.length} of ${whole(now.run.clients.total)} clients are drawn.`
          : "";
      const name = measureName(state.measure);
      if (now.plain)
        return `${name[0].toUpperCase()}${name.slice(1)} at each client, ${when(now)}. Empty: not held, or not measured.${part}`;
      let up = 0,
        count = 0;
      now.ids.forEach((_, r) =>
        objectives.forEach((_, s) => {
          const g = now.gain(r, s);
          if (known(g)) {
            count += 1;
            if (g > 0) up += 1;
          }
        }),
      );
      return `What taking part brings over training alone (${many(now.other.rounds, "round")}), ${when(now)}. Blue: better off than alone; orange: worse off. ${up} of ${count} pairs of client and objective are better off.${state.measure === "loss" ? " On training data a client alone is hard to beat: it may learn its few samples by heart." : ""}${part}`;
    },
    draw(width, look, exporting) {
      const now = prepare();
      if (!now) return "No loss of a single client was recorded.";
      const chosen = visibleObjectives().filter((s) => has(now.run, s));
      if (!chosen.length) return NONE_SHOWN;
      const { ids, cell, plain } = now,
        values = ids.flatMap((_, r) => chosen.map((s) => cell(r, s))).filter(known);
      if (!values.length) return nothing(now);
      let color, key;
      if (plain) {
        const low = Math.min(...values),
          high = Math.max(...values),
          log = low > 0 && high / low > 20;
        const part = (v) =>
          high === low ? 0.5 : log ? Math.log(v / low) / Math.log(high / low) : (v - low) / (high - low);
        color = (v, l) => amount(0.06 + 0.94 * part(v), l);
        key = {
          from: 0,
          to: 1,
          value: (p) => (log ? low * (high / low) ** p : low + p * (high - low)),
          ends: [fmt(low, 3), fmt(high, 3)],
          words: quantity(now) + (log ? " (log)" : ""),
        };
      } else {
        const turned = state.view === "ratio" ? (v) => now.sign * Math.log2(v) : (v) => v;
        const most = Math.max(...values.map((v) => Math.abs(turned(v))), 1e-12);
        color = (v, l) => balance(turned(v) / most, l);
        const back = state.view === "ratio" ? (p) => 2 ** (now.sign * p * most) : (p) => p * most;
        key = {
          from: -1,
          to: 1,
          value: back,
          ends:
            state.view === "ratio"
              ? [`${fmt(back(-1), 3)} worse`, `${fmt(back(1), 3)} better`]
              : [`${fmt(-most, 3)} worse`, `+${fmt(most, 3)} better`],
          words: quantity(now),
        };
      }
      return drawHeat(
        {
          title: `${quantity(now)} per client and objective`,
          rows: ids,
          columns: chosen.map((s) => objectives[s]),
          rowLabel: "client",
          columnLabel: "objective",
          widest: 130,
          value: (r, c) => cell(r, chosen[c]),
          color,
          key,
          text: (v) => fmt(v, 3),
          keys: (r, c) => objectiveKeys(chosen[c]),
          tip: (r, c) => {
            const s = chosen[c];
            return {
              title: `${ids[r]}, ${objectives[s]}`,
              rows: [
                { name: measureName(state.measure), text: fmt(now.value(r, s)) },
                ...(now.other
                  ? [
                      { name: "alone", text: fmt(now.alone(r, s)) },
                      { name: "gain", text: fmt(now.gain(r, s)) },
                    ]
                  : []),
              ],
            };
          },
        },
        width,
        look,
        exporting,
      );
    },
  });
  const strip = makeCard({
    id: "spread",
    title: "Are clients served alike?",
    wide: manyObjectives,
    say: () =>
      `Each dot is a client, the bar their median: the longer a row, the more the model suits some clients better than others.${prepare() && !prepare().plain ? ` ${state.view === "ratio" ? "At 1" : "At 0"} a client is as well off as alone.` : ""}`,
    draw(width, look, exporting) {
      const now = prepare();
      if (!now) return "No loss of a single client was recorded.";
      const chosen = visibleObjectives().filter((s) => has(now.run, s));
      if (!chosen.length) return NONE_SHOWN;
      const rows = chosen.map((s) => ({
        name: manyObjectives ? `${s + 1} ${objectives[s]}` : objectives[s],
        color: single ? ofObjective(s, look) : EIGHT[look.name][0],
        keys: objectiveKeys(s),
        dots: now.ids.map((id, r) => ({ name: id, value: now.cell(r, s) })).filter((d) => known(d.value)),
      }));
      const values = rows.flatMap((r) => r.dots.map((d) => d.value));
      if (!values.length) return nothing(now);
      const low = Math.min(...values),
        high = Math.max(...values);
      return drawStrip(
        {
          title: `${quantity(now)}: clients beside one another`,
          rows,
          x: { label: quantity(now), log: state.view !== "gain" && low > 0 && high / low > 20 },
          line: now.plain ? null : state.view === "ratio" ? 1 : 0,
        },
        width,
        look,
        exporting,
      );
    },
  });
  return manyObjectives ? stack(heat, strip) : grid(heat, strip);
}
