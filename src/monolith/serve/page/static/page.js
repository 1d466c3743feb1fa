// The operator's page. Every text that comes from a server is set as textContent: names and ids may be hostile.
const CHARTS = [
  { title: "Requests per second", columns: ["requests_per_second", "errors_per_second", "shed_per_second"], names: ["all", "errors", "shed"], show: (x) => number(x) },
  { title: "Latency", columns: ["latency_p50_seconds", "latency_p99_seconds"], names: ["p50", "p99"], show: seconds },
  { title: "Lag behind training", columns: ["lag_seconds"], names: ["lag"], show: seconds },
];
const COLOURS = ["first", "second", "third"];
const KEEP = 3600; // samples, one per second
const TOKEN = "monolith-token";

const byId = (id) => document.getElementById(id);
const dark = matchMedia("(prefers-color-scheme: dark)");
const views = new Map(); // what is shown of each replica, by its address
let newest = 0; // server time of the newest sample
let heard = null; // when the server answered last, of this browser's clock
let document_ = null; // the last answer

// --- Words and numbers -----------------------------------------------------------------------------------------------

function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "class") made.className = value;
    else if (name === "hidden") made.hidden = value;
    else made.setAttribute(name, value);
  }
  made.append(...children.map((child) => (child instanceof Node ? child : document.createTextNode(String(child)))));
  return made;
}

function setText(target, text) {
  if (target.textContent !== text) target.textContent = text;
}

function number(value) {
  if (value === null || value === undefined) return "–";
  const digits = Number.isInteger(value) || Math.abs(value) >= 100 ? 0 : Math.abs(value) >= 10 ? 1 : 2;
  return value.toLocaleString("en", { maximumFractionDigits: digits });
}

function seconds(value) {
  if (value === null || value === undefined) return "–";
  if (value <= 0) return "0 s";
  if (value < 0.001) return `${(value * 1e6).toFixed(0)} µs`;
  if (value < 1) return `${(value * 1000).toPrecision(3)} ms`;
  if (value < 120) return `${value.toPrecision(3)} s`;
  if (value < 7200) return `${(value / 60).toFixed(0)} min`;
  return value < 172800 ? `${(value / 3600).toFixed(1)} h` : `${(value / 86400).toFixed(1)} days`;
}

function bytes(value) {
  const units = ["B", "kB", "MB", "GB", "TB"];
  let unit = 0;
  for (; value >= 1000 && unit < units.length - 1; unit++) value /= 1000;
  return `${unit ? value.toPrecision(3) : value} ${units[unit]}`;
}

function moment(value) {
  if (!value) return "–";
  const at = new Date(value * 1000);
  return Number.isNaN(at.getTime()) ? "–" : at.toLocaleString("sv");
}

const clock = (time) => new Date(time * 1000).toLocaleTimeString("sv");

function metric(value) {
  if (typeof value !== "number") return String(value ?? "–");
  return Number.isInteger(value) ? value.toLocaleString("en") : value.toPrecision(4);
}

// --- Tables ----------------------------------------------------------------------------------------------------------

// A column is [title, function of a row, class]. A table whose text is the same is left alone, so that it can be selected.
function fill(holder, caption, columns, rows) {
  const texts = rows.map((row) => columns.map(([, cell]) => cell(row)));
  const key = JSON.stringify([columns.map(([title]) => title), texts]);
  if (holder.dataset.key === key) return;
  holder.dataset.key = key;
  // The roles keep it a table for screen readers where a narrow screen shows it as blocks.
  const head = element("tr", { role: "row" }, ...columns.map(([title, , kind]) => element("th", { scope: "col", role: "columnheader", class: kind }, title)));
  const cell = (text, at) => element("td", { role: "cell", class: columns[at][2], "data-label": columns[at][0] }, element("span", {}, text));
  const body = texts.map((row) => element("tr", { role: "row" }, ...row.map(cell)));
  holder.replaceChildren(element("table", { role: "table" }, element("caption", {}, caption),
    element("thead", { role: "rowgroup" }, head), element("tbody", { role: "rowgroup" }, ...body)));
}

const scroller = (label) => element("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": label });

// --- Charts ----------------------------------------------------------------------------------------------------------

async function loadCharts() {
  document.head.append(element("link", { rel: "stylesheet", href: "static/uplot/uPlot.min.css" }));
  await new Promise((done) => {
    const script = element("script", { src: "static/uplot/uPlot.iife.min.js" });
    script.onload = script.onerror = done;
    document.head.append(script);
  });
}

const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

class Chart {
  constructor({ title, columns, names, show }) {
    Object.assign(this, { columns, names, show, plot: null });
    this.legend = element("div", { class: "legend" }, ...names.map((name, at) => element("span", { class: `key ${COLOURS[at]}` }, name)));
    this.holder = element("div", { class: "plot", role: "img", "aria-label": title });
    this.figure = element("figure", {}, element("figcaption", {}, title), this.legend, this.holder);
    new ResizeObserver(() => this.resize()).observe(this.holder);
    this.data = [[]];
  }

  resize() {
    const width = this.holder.clientWidth;
    if (this.plot && width && width !== this.plot.width) this.plot.setSize({ width, height: 160 });
  }

  forget() {
    if (this.plot) this.plot.destroy();
    this.plot = null;
    this.draw(this.data);
  }

  update(series) {
    this.draw([series.time, ...this.columns.map((column) => series[column])]);
  }

  draw(data) {
    this.data = data;
    // Simple lines have no axis, so the text says how high they go.
    const top = (line) => (window.uPlot ? "" : `, at most ${this.show(Math.max(0, ...(line ?? [])))}`);
    this.names.forEach((name, at) => setText(this.legend.children[at], `${name} ${this.show(data[at + 1]?.at(-1))}${top(data[at + 1])}`));
    if (!window.uPlot) sparkline(this.holder, data);
    else if (this.plot) this.plot.setData(data);
    else if (this.holder.clientWidth) this.plot = new window.uPlot(this.options(), data, this.holder);
  }

  options() {
    const axis = { stroke: colour("soft"), grid: { stroke: colour("line"), width: 1 }, ticks: { show: false }, font: "11px system-ui" };
    const lines = this.names.map((label, at) => ({ label, stroke: colour(COLOURS[at]), width: 1.5, points: { show: false }, value: (_, x) => this.show(x) }));
    return {
      width: this.holder.clientWidth,
      height: 160,
      series: [{}, ...lines],
      scales: { y: { range: (_, low, high) => [0, Math.max(high ?? 0, 1e-6) * 1.1] } },
      axes: [{ ...axis, space: 70, size: 26, values: (_, ticks) => ticks.map((time) => clock(time)) }, { ...axis, size: 62, values: (_, ticks) => ticks.map(this.show) }],
      cursor: { y: false },
      hooks: { setCursor: [(plot) => this.hover(plot)] },
      legend: { show: false },
    };
  }

  hover(plot) {
    const at = plot.cursor.idx ?? this.data[0].length - 1;
    this.names.forEach((name, line) => setText(this.legend.children[line], `${name} ${this.show(this.data[line + 1]?.[at])}`));
  }
}

function sparkline(holder, [times, ...lines]) {
  const space = "http://www.w3.org/2000/svg";
  const svg = document.createElementNS(space, "svg");
  svg.setAttribute("class", "plot");
  svg.setAttribute("viewBox", "0 0 1000 100");
  svg.setAttribute("preserveAspectRatio", "none");
  const top = Math.max(1e-9, ...lines.flat().filter((value) => value !== null));
  const [first, last] = [times[0] ?? 0, times.at(-1) ?? 1];
  lines.forEach((line, number_) => {
    let drawn = "";
    line.forEach((value, at) => {
      if (value === null) return;
      const x = (1000 * (times[at] - first)) / Math.max(1, last - first);
      drawn += `${drawn && line[at - 1] !== null ? "L" : "M"}${x.toFixed(1)} ${(97 - (94 * value) / top).toFixed(1)}`;
    });
    const path = document.createElementNS(space, "path");
    path.setAttribute("class", COLOURS[number_]);
    path.setAttribute("d", drawn);
    svg.append(path);
  });
  holder.replaceChildren(svg);
}

// --- One replica -----------------------------------------------------------------------------------------------------

const VERSIONS = [
  ["model", (row) => row.model, "name"],
  ["version", (row) => `${row.version}${row.default ? " (default)" : ""}`, "name"],
  ["requests", (row) => number(row.requests.total), "number"],
  ["rows", (row) => number(row.requests.rows), "number"],
  ["invalid", (row) => number(row.requests.invalid), "number"],
  ["errors", (row) => number(row.requests.error + row.requests.deadline), "number"],
  ["shed", (row) => number(row.requests.overloaded), "number"],
  ["latency p50", (row) => seconds(row.latency.p50), "number"],
  ["p99", (row) => seconds(row.latency.p99), "number"],
  ["max", (row) => seconds(row.latency.max), "number"],
];
const FRESHNESS = [
  ...VERSIONS.slice(0, 2),
  ["lag now", (row) => seconds(row.lag.seconds) + (row.lag.connected ? "" : ", not connected"), "number"],
  ["p50", (row) => seconds(row.freshness.p50), "number"],
  ["p90", (row) => seconds(row.freshness.p90), "number"],
  ["p99", (row) => seconds(row.freshness.p99), "number"],
  ["max", (row) => seconds(row.freshness.max), "number"],
  ["step", (row) => number(row.lag.step), "number"],
  ["sequence", (row) => number(row.lag.sequence), "number"],
  ["newest event", (row) => moment(row.lag.event_time), "number"],
];
const TABLES = [
  ["model", (row) => row.model, "name"],
  ["version", (row) => String(row.version), "name"],
  ["table", (row) => row.name, "name"],
  ["rows", (row) => number(row.rows), "number"],
  ["memory", (row) => bytes(row.bytes), "number"],
  ["bytes per row", (row) => (row.rows ? number(row.bytes / row.rows) : "–"), "number"],
];

class ReplicaView {
  constructor(address) {
    this.address = address;
    this.series = { time: [] };
    this.title = element("h2", {}, address || "This replica");
    this.problem = element("p", { class: "banner", role: "alert", hidden: true });
    this.rollback = element("button", { class: "danger", type: "button", hidden: true }, "Roll back …");
    this.rollback.addEventListener("click", () => askRollback(this.replica));
    this.tiles = element("dl", { class: "tiles" });
    this.charts = CHARTS.map((chart) => new Chart(chart));
    this.versions = scroller("Versions");
    this.freshness = scroller("Freshness");
    this.tables = scroller("Tables");
    this.quality = scroller("Quality");
    this.unserved = element("p", { class: "note", hidden: true });
    this.body = element("div", {}, this.tiles, element("div", { class: "charts" }, ...this.charts.map((chart) => chart.figure)),
      this.versions, this.freshness, this.quality, this.tables, this.unserved);
    this.section = element("section", { class: "card" }, element("div", { class: "title" }, this.title, this.rollback), this.problem, this.body);
  }

  update(replica) {
    this.problem.hidden = replica.reachable;
    this.body.classList.toggle("old", !replica.reachable);
    if (!replica.reachable) {
      setText(this.problem, `No answer from this replica: ${replica.error ?? "unknown reason"}`);
      return;
    }
    this.warn(replica);
    this.replica = replica;
    this.rollback.hidden = !replica.models.some((model) => model.rollback.possible);
    this.extend(replica.series);
    this.updateTiles(replica);
    for (const chart of this.charts) chart.update(this.series);
    const versions = replica.models.flatMap((model) => model.versions.map((version) => ({ ...version, model: model.name })));
    fill(this.versions, "Versions: what they answered, and the latency of the last 1,024 requests", VERSIONS, versions);
    const following = versions.filter((version) => version.lag);
    this.freshness.hidden = !following.length;
    if (following.length) fill(this.freshness, "Freshness: how far versions are behind training, in the last 5 minutes", FRESHNESS, following);
    fill(this.tables, "Tables", TABLES, versions.flatMap(({ model, version, tables }) => tables.map((table) => ({ ...table, model, version }))));
    this.updateQuality(versions);
    const unserved = replica.unserved.total;
    this.unserved.hidden = !unserved;
    setText(this.unserved, `${number(unserved)} requests reached no version: unknown models, shed or malformed requests.`);
  }

  warn(replica) {
    const told = replica.models.flatMap(({ name, versions }) => versions.filter(({ lag }) => lag?.missing)
      .map(({ version, lag }) => `${name} ${version} may lack the last changes of its run. ${lag.missing}`));
    this.problem.hidden = !told.length;
    setText(this.problem, told.join(" "));
  }

  updateQuality(versions) {
    const judged = versions.filter((version) => Object.keys(version.quality).length);
    this.quality.hidden = !judged.length;
    const names = [...new Set(judged.flatMap((version) => Object.keys(version.quality)))];
    const columns = [...VERSIONS.slice(0, 2), ...names.map((name) => [name.replaceAll("_", " "), (row) => metric(row.quality[name]), "number"])];
    if (judged.length) fill(this.quality, "Quality of versions, from joined labels", columns, judged);
  }

  extend(series) {
    // A server that was restarted, or another clock, begins a new series.
    const last = this.series.time.at(-1) ?? -Infinity;
    const from = series.time.findIndex((time) => time > last);
    for (const [name, values] of Object.entries(series)) {
      const known = (this.series[name] ??= []);
      if (from >= 0) known.push(...values.slice(from));
      if (known.length > KEEP) known.splice(0, known.length - KEEP);
    }
  }

  updateTiles(replica) {
    const load = replica.load ?? {};
    const behind = replica.models.flatMap((model) => model.versions).filter((version) => version.default && version.lag);
    const lag = behind.length ? Math.max(...behind.map((version) => version.lag.seconds)) : null;
    const tiles = [
      ["Lag", lag === null ? "not following" : seconds(lag), behind.some((version) => !version.lag.connected)],
      ["Requests", `${number(load.requests_per_second)} /s`, false],
      ["Errors", `${number(load.errors_per_second)} /s`, load.errors_per_second > 0],
      ["Shed", `${number(load.shed_per_second)} /s`, load.shed_per_second > 0],
      ["Latency p50", seconds(load.latency_p50_seconds), false],
      ["Latency p99", seconds(load.latency_p99_seconds), false],
      ["In flight", number(replica.in_flight), false],
      ["Up for", seconds(replica.uptime_seconds), false],
    ];
    if (!this.tiles.children.length) this.tiles.append(...tiles.map(([name]) => element("div", {}, element("dt", {}, name), element("dd"))));
    tiles.forEach(([, text, bad], at) => {
      const tile = this.tiles.children[at];
      tile.classList.toggle("bad", bad);
      setText(tile.lastChild, text);
    });
  }
}

// --- Runs ------------------------------------------------------------------------------------------------------------

function streamLag(live) {
  if (!live) return "";
  if (!live.answers) return "no answer";
  if (live.lag_records == null) return live.state;
  const age = live.lag_seconds == null ? "" : `, ${seconds(live.lag_seconds)}`;
  const bad = live.bad_records ? `, ${number(live.bad_records)} bad` : "";
  return `${number(live.lag_records)} records behind${age}${bad}`;
}

const BEHIND_SECS = 5;
const before = new Map(); // lag of each run at the last change, and whether it grew

// A replica may have all that was trained, and answer as of an hour ago, because training is behind its stream.
function updateBehind(known) {
  const texts = [];
  for (const { path, live } of known) {
    const last = before.get(path);
    if (live && !live.answers) {
      const was = last ? ` When it last did, it was ${number(last.records)} records behind.` : "";
      texts.push(`Training of ${path} does not answer: nobody knows how far it is behind its stream.${was}`);
    }
    if (live?.lag_records == null) continue;
    if (!last || last.records !== live.lag_records)
      before.set(path, { records: live.lag_records, grows: last ? live.lag_records > last.records : null });
    const { grows } = before.get(path);
    if (!(live.lag_seconds >= BEHIND_SECS)) continue;
    const trend = grows === null ? "" : grows ? ", and the lag grows: more comes than is trained" : ", and it catches up";
    texts.push(`Training of ${path} is ${number(live.lag_records)} records (${seconds(live.lag_seconds)}) behind its stream${trend}. The answers do not know what came since.`);
  }
  byId("behind").hidden = !texts.length;
  setText(byId("behind"), texts.join(" "));
}

const RUNS = [
  ["run", (run) => run.path, "name"],
  ["step", (run) => number(run.live?.step ?? run.step), "number"],
  ["newest checkpoint", (run) => (run.checkpoint ? `${run.checkpoint.name}, ${moment(run.checkpoint.time)}` : "none"), "name"],
  ["log segments", (run) => number(run.log.segments), "number"],
  ["log size", (run) => bytes(run.log.bytes), "number"],
  ["newest sequence", (run) => number(run.log.sequence), "number"],
  ["newest change", (run) => moment(run.log.time), "number"],
  ["stream", (run) => streamLag(run.live), "name"],
  ["problem", (run) => run.error ?? run.live?.problem ?? "", "name"],
];
const runs = element("section", { class: "card", hidden: true }, element("h2", {}, "Runs"), scroller("Runs"));

// --- One id ----------------------------------------------------------------------------------------------------------

function offer(select, options) {
  const key = JSON.stringify(options);
  if (select.dataset.key === key) return;
  select.dataset.key = key;
  const chosen = select.value;
  select.replaceChildren(...options.map(([value, text]) => element("option", { value }, text)));
  if (options.some(([value]) => value === chosen)) select.value = chosen;
}

function updateLookup(replicas) {
  const usable = replicas.filter((replica) => replica.reachable);
  offer(byId("lookup-replica"), usable.map((replica) => [replica.address, replica.address || "This replica"]));
  byId("lookup-replica").parentElement.hidden = replicas.length < 2;
  const replica = usable.find(({ address }) => address === byId("lookup-replica").value);
  const tables = (replica?.models ?? []).flatMap((model) => [...model.versions].sort((a, b) => b.default - a.default).flatMap((version) => version.tables.map((table) => ({ model, version, table }))));
  offer(byId("lookup-table"), tables.map(({ model, version, table }) =>
    [JSON.stringify([table.name, model.name, version.version]), `${table.name} (${model.name}, ${version.version})`]));
  byId("lookup").hidden = !tables.length;
}

async function lookup(event) {
  event.preventDefault();
  const answer = byId("lookup-answer");
  const [table, model, version] = JSON.parse(byId("lookup-table").value);
  const query = new URLSearchParams({ model, version, replica: byId("lookup-replica").value });
  answer.replaceChildren(element("p", { class: "note" }, "Looking it up …"));
  try {
    const response = await ask(`ids/${encodeURIComponent(table)}/${encodeURIComponent(byId("lookup-id").value.trim())}?${query}`);
    const row = await response.json();
    answer.replaceChildren(...(response.ok ? describeRow(row) : [element("p", { class: "banner" }, row.error ?? `HTTP ${response.status}`)]));
  } catch (error) {
    answer.replaceChildren(element("p", { class: "banner" }, `No answer: ${error.message}`));
  }
}

const values = (list) => (list ?? []).map((value) => (value === null ? "NaN" : value.toPrecision(5))).join(" ");
const served = (change) => (change.served ? `${change.served_earlier ? "before " : ""}${moment(change.served)}` : "unknown");

function describeRow(row) {
  const now = scroller("Row");
  fill(now, `${row.text === undefined ? "" : `Text "${row.text}", `}Id ${row.id} in table ${row.table} of ${row.model}, version ${row.version}, now`, [
    ["row", (x) => (x.found ? "yes" : "none: it is read as its initial value"), "name"],
    ["norm", (x) => (x.found ? metric(x.norm) : "–"), "number"],
    ["newest event", (x) => moment(x.event_time), "number"],
    ["learnt", (x) => (x.learnt ? `${moment(x.learnt.time)}, step ${number(x.learnt.step)}` : "unknown"), "name"],
    ["first served", (x) => (x.learnt ? served(x.learnt) : "unknown"), "name"],
    ["values", (x) => values(x.values), "values"],
  ], [row]);
  const parts = [now];
  if (row.changes?.length) {
    const changes = scroller("History");
    fill(changes, "History from the log, newest first", [
      ["time", (x) => moment(x.time), "number"],
      ["step", (x) => number(x.step), "number"],
      ["sequence", (x) => number(x.sequence), "number"],
      ["served since", served, "number"],
      ["norm", (x) => (x.erased ? "erased" : metric(x.norm)), "number"],
      ["values", (x) => values(x.values), "values"],
    ], [...row.changes].reverse());
    parts.push(changes);
  }
  if (row.note) parts.push(element("p", { class: "note" }, row.note));
  return parts;
}

// --- Rollback --------------------------------------------------------------------------------------------------------

function askRollback(replica) {
  const models = replica.models.filter((model) => model.rollback.possible);
  byId("rollback-model").replaceChildren(...models.map((model) => element("option", { value: model.name }, model.name)));
  const explain = () => setText(byId("rollback-reason"), models.find((model) => model.name === byId("rollback-model").value)?.rollback.reason ?? "");
  byId("rollback-model").onchange = explain;
  explain();
  setText(byId("rollback-answer"), "");
  byId("rollback-token").value = sessionStorage.getItem(TOKEN) ?? "";
  byId("rollback").showModal();
}

async function rollBack(event) {
  event.preventDefault();
  const answer = byId("rollback-answer");
  setText(answer, "Rolling back …");
  try {
    const response = await fetch("rollout/rollback", {
      method: "POST",
      headers: { Authorization: `Bearer ${byId("rollback-token").value}`, "Content-Type": "application/json" },
      body: JSON.stringify({ model: byId("rollback-model").value, to: byId("rollback-to").value.trim() || null }),
    });
    const said = await response.json().catch(() => ({}));
    setText(answer, response.ok ? said.message ?? "Rolled back." : `Refused (${response.status}): ${said.error ?? response.statusText}`);
  } catch (error) {
    setText(answer, `No answer: ${error.message}`);
  }
}

// --- Every second ----------------------------------------------------------------------------------------------------

function ask(path) {
  const token = sessionStorage.getItem(TOKEN);
  return fetch(path, { headers: token ? { Authorization: `Bearer ${token}` } : {}, cache: "no-store", signal: AbortSignal.timeout(5000) });
}

function show(status) {
  document_ = status;
  byId("reduced").hidden = Boolean(window.uPlot);
  for (const replica of status.replicas) {
    if (!views.has(replica.address)) {
      views.set(replica.address, new ReplicaView(replica.address));
      byId("content").append(views.get(replica.address).section);
    }
    views.get(replica.address).update(replica);
  }
  const times = [...views.values()].map((view) => view.series.time.at(-1) ?? 0);
  newest = times.length ? Math.min(...times) : 0;
  runs.hidden = !status.runs.length;
  if (!runs.isConnected) byId("content").append(runs);
  updateBehind(status.runs);
  fill(runs.lastChild, "Training: how far runs are, and how far behind their streams", RUNS, status.runs);
  updateLookup(status.replicas);
}

async function refresh() {
  try {
    const response = await ask(`status.json?since=${newest}`);
    byId("token-form").hidden = response.status !== 401 && response.status !== 403;
    if (!response.ok) throw new Error(response.status === 401 || response.status === 403 ? "it needs its token" : `HTTP ${response.status}`);
    const status = await response.json();
    if (document_ === null && status.charts) await loadCharts();
    heard = Date.now();
    show(status);
    byId("silent").hidden = true;
    byId("content").classList.remove("old");
    byId("state").className = "live";
    setText(byId("state"), `Live, ${new Date().toLocaleTimeString("sv")}`);
  } catch (error) {
    silent(error);
  }
}

function silent(error) {
  const since = heard === null ? "" : ` since ${new Date(heard).toLocaleTimeString("sv")}. What you see is old`;
  setText(byId("silent"), `No answer from the server${since}: ${error.message}`);
  byId("silent").hidden = false;
  byId("content").classList.add("old");
  byId("state").className = "";
  setText(byId("state"), "Not connected");
}

byId("token-form").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem(TOKEN, byId("token").value);
  byId("token").value = "";
  refresh();
});
byId("lookup-form").addEventListener("submit", lookup);
byId("lookup-replica").addEventListener("change", () => updateLookup(document_.replicas));
byId("rollback-form").addEventListener("submit", rollBack);
byId("rollback-close").addEventListener("click", () => byId("rollback").close());
dark.addEventListener("change", () => views.forEach((view) => view.charts.forEach((chart) => chart.forget())));

// The next question is asked a second after the last answer, so that a slow server is not asked twice at once.
for (;;) {
  await refresh();
  await new Promise((done) => setTimeout(done, 1000));
}
