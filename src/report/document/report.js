"use strict";
// Draws the charts of a report with ECharts. Their data is in the element "data"; nothing is loaded from elsewhere.
(() => {
  const jobs = JSON.parse(document.getElementById("data").textContent);
  const root = document.documentElement;
  const darkSystem = matchMedia("(prefers-color-scheme: dark)");
  // These colors differ for color-blind eyes as well (Okabe and Ito).
  const colors = ["#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#8a8a8a", "#b0a000"];
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  const percent = (share) => (share * 100).toFixed(1) + " %";
  const number = (value, digits = 3) => (value == null ? "-" : Number(value.toPrecision(digits)).toString());

  function size(bytes) {
    if (bytes == null) return "unknown size";
    let unit = 0;
    while (bytes >= 1024 && unit < units.length - 1) {
      bytes /= 1024;
      unit += 1;
    }
    return number(bytes) + " " + units[unit];
  }

  // Host names and labels are data: they reach tooltips as text alone.
  function text(value) {
    const span = document.createElement("span");
    span.textContent = String(value);
    return span.innerHTML;
  }

  // Bins are moments of Unix time where clocks are known, else seconds since the first operation.
  function timeAxis(job) {
    return job.begin_ms == null ? { type: "value", name: "s" } : { type: "time" };
  }

  function moment(job, bin) {
    return job.begin_ms == null ? (bin * job.bin_ms) / 1e3 : job.begin_ms + bin * job.bin_ms;
  }

  function clock(job, bin) {
    const at = moment(job, bin);
    return job.begin_ms == null ? number(at) + " s" : new Date(at).toISOString().slice(11, 23) + " UTC";
  }

  function mean(job, of) {
    const out = [];
    for (let bin = 0; bin < job.bins; bin += 1) {
      const known = job.ranks.map((rank) => rank[of][bin]).filter((value) => value != null);
      const sum = known.reduce((sum, value) => sum + value, 0);
      out.push([moment(job, bin), known.length ? sum / known.length : null]);
    }
    return out;
  }

  function share(job) {
    const line = (name, of) => {
      const data = mean(job, of);
      // A moment between two that are not known has no line.
      const showSymbol = data.some(([, v], at) => v != null && data[at - 1]?.[1] == null && data[at + 1]?.[1] == null);
      return { name, type: "line", showSymbol, areaStyle: { opacity: 0.15 }, data };
    };
    return {
      legend: {},
      tooltip: { trigger: "axis", valueFormatter: (v) => (v == null ? "not known" : percent(v)) },
      xAxis: timeAxis(job),
      yAxis: { type: "value", min: 0, axisLabel: { formatter: percent } },
      dataZoom: [{ type: "inside" }],
      series: [line("in NCCL's kernels", "in_nccl"), line("waiting for others", "waited")],
    };
  }

  function steps(job) {
    const times = job.steps.flatMap((s) => s.points.map((p) => p[1])).sort((a, b) => a - b);
    // One long step, the first one for example, must not flatten all others.
    const isUneven = times.length > 0 && times[times.length - 1] > 8 * times[times.length >> 1];
    return {
      legend: { type: "scroll" },
      tooltip: { trigger: "axis", valueFormatter: (v) => number(v, 4) + " ms" },
      xAxis: { type: "time" },
      yAxis: { type: isUneven ? "log" : "value", name: "ms", scale: true },
      dataZoom: [{ type: "inside" }],
      series: job.steps.map((s) => ({ name: "rank " + s.label, type: "line", showSymbol: s.points.length < 40, data: s.points })),
    };
  }

  function heat(job, of) {
    const [cells, unknown] = [[], []];
    job.ranks.forEach((rank, y) => rank[of].forEach((value, x) => {
      if (value == null) unknown.push([x, y, 0]);
      else if (value > 0) cells.push([x, y, value]);
    }));
    // A tenth of the time is much, and below nothing is dark.
    const most = cells.reduce((most, cell) => Math.max(most, cell[2]), 0.1);
    return {
      tooltip: {
        formatter: ({ data, seriesIndex }) =>
          "rank " + text(job.ranks[data[1]].label) + ", " + clock(job, data[0]) + ": " + (seriesIndex ? "not known" : percent(data[2])),
      },
      grid: { top: 35, bottom: 80, left: 70, right: 40 },
      xAxis: { type: "category", data: Array.from({ length: job.bins }, (_, bin) => clock(job, bin)) },
      yAxis: { type: "category", name: "rank", data: job.ranks.map((rank) => rank.label) },
      visualMap: [
        {
          seriesIndex: 0, min: 0, max: most, calculable: true, orient: "horizontal", left: "center", bottom: 0, formatter: percent,
          inRange: { color: ["#fff7e0", "#f0b040", "#b0330b", "#4a0d3a"] },
        },
        { seriesIndex: 1, show: false, min: 0, max: 1, inRange: { color: ["rgba(128, 128, 128, 0.22)"] } },
      ],
      series: [
        { type: "heatmap", data: cells, progressive: 0 },
        { type: "heatmap", data: unknown, progressive: 0 },
      ],
    };
  }

  function bandwidth(job) {
    const groups = new Map();
    const add = (points, type) =>
      points.forEach((p) => {
        const name = p.operation + ", " + (p.ranks ?? "-") + " ranks" + (type === "line" ? ", expected" : "");
        if (!groups.has(name)) groups.set(name, { name, type, symbolSize: 9, data: [] });
        groups.get(name).data.push({ value: [p.bytes, p.busbw / 1e9], point: p });
      });
    add(job.bandwidth, "scatter");
    add(job.expected, "line");
    return {
      legend: { type: "scroll" },
      tooltip: {
        formatter: ({ data, seriesName }) =>
          text(seriesName) + "<br>" + size(data.value[0]) + ": " + number(data.value[1]) + " GB/s" +
          (data.point.algorithm ? ", " + text(data.point.algorithm) : "") +
          (data.point.count ? "<br>" + data.point.count + " operations" : ""),
      },
      xAxis: { type: "log", logBase: 2, name: "bytes", axisLabel: { formatter: size } },
      yAxis: { type: "value", name: "GB/s" },
      series: [...groups.values()].map((g) => ({ ...g, data: g.data.sort((a, b) => a.value[0] - b.value[0]) })),
    };
  }

  function latency(job) {
    const name = (l) => l.operation + (l.from_bytes == null ? "" : ", from " + size(l.from_bytes));
    const series = job.latency.map((l, at) => ({
      name: name(l), type: "line", step: "end", showSymbol: l.buckets.length < 3, data: l.buckets, areaStyle: { opacity: 0.08 },
      lineStyle: { type: at < colors.length ? "solid" : "dashed" },
    }));
    return {
      legend: { type: "scroll" },
      tooltip: { trigger: "axis", axisPointer: { type: "line" } },
      xAxis: { type: "log", name: "µs", min: (range) => range.min / 1.2, axisLabel: { formatter: (v) => number(v) } },
      yAxis: { type: "value", name: "operations" },
      series,
    };
  }

  function slowest(job, picked) {
    const op = job.slowest[picked];
    if (!op) return {};
    const rows = op.parts.map((p) => {
      const isTimed = p.started_ms != null && p.ended_ms != null;
      const waited = isTimed ? p.waited_ms ?? 0 : 0;
      // Most calls are issued long before: the time since the first kernel's start is shown.
      const from = Math.max(0, isTimed ? Math.min(p.issued_ms ?? p.started_ms, p.started_ms) : p.issued_ms ?? 0);
      return {
        offset: from,
        before: isTimed ? Math.max(0, p.started_ms - from) : 0,
        waited,
        rest: isTimed ? Math.max(0, p.ended_ms - p.started_ms - waited) : 0,
        isTimed,
      };
    });
    const bar = (name, of, color) => ({
      name, type: "bar", stack: "time", barMaxWidth: 18, itemStyle: { color }, data: rows.map((row) => row[of]),
    });
    return {
      legend: { data: ["issued, not started", "waiting for others", "transfer"] },
      tooltip: {
        formatter: ({ dataIndex: at }) => {
          const [p, row] = [op.parts[at], rows[at]];
          if (!row.isTimed) return "rank " + p.rank + ": issued at " + number(row.offset) + " ms; its GPU time is not known";
          return "rank " + p.rank + ": issued at " + number(p.issued_ms) + " ms, started at " + number(p.started_ms) +
            " ms, waited " + number(p.waited_ms) + " ms, ended at " + number(p.ended_ms) + " ms";
        },
      },
      grid: { left: 90, right: 30, bottom: 40 },
      xAxis: { type: "value", name: "ms" },
      yAxis: { type: "category", inverse: true, data: op.parts.map((p) => "rank " + p.rank) },
      series: [
        { ...bar("offset", "offset", "transparent"), silent: true },
        bar("issued, not started", "before", "#8a8a8a"),
        bar("waiting for others", "waited", "#E69F00"),
        bar("transfer", "rest", "#0072B2"),
      ],
    };
  }

  const draw = {
    share, steps, bandwidth, latency, slowest,
    waited: (job) => heat(job, "waited"),
    held: (job) => heat(job, "held"),
  };
  const charts = [];

  function show(chart) {
    const isDark = root.dataset.theme === "dark";
    if (chart.drawn) chart.drawn.dispose();
    chart.drawn = echarts.init(chart.element, isDark ? "dark" : null, { renderer: "canvas" });
    const option = draw[chart.kind](chart.job, chart.picked);
    chart.drawn.setOption({ backgroundColor: "transparent", color: colors, animation: false, useUTC: true, grid: { left: 70, right: 60, bottom: 50 }, ...option });
    const isKnown = (d) => {
      const value = [d?.value ?? d].flat().at(-1);
      return value != null && value !== 0;
    };
    const points = (option.series ?? []).reduce((sum, s) => sum + s.data.filter(isKnown).length, 0);
    chart.element.dataset.points = String(points);
  }

  function setTheme(theme) {
    root.dataset.theme = theme;
    charts.forEach(show);
  }

  document.querySelectorAll(".chart").forEach((element) => {
    charts.push({ element, kind: element.dataset.chart, job: jobs[Number(element.dataset.job)], picked: 0 });
  });
  document.querySelectorAll("select[data-job]").forEach((select) => {
    const job = jobs[Number(select.dataset.job)];
    job.slowest.forEach((op, at) => {
      const late = op.late ? ", rank " + op.late[0] + " late by " + number(op.late[1]) + " ms" : "";
      select.add(new Option(`${number(op.took_ms)} ms: ${op.operation} #${op.order}, ${size(op.bytes)}, ${op.communicator}${late}`, at));
    });
    select.addEventListener("change", () => {
      const chart = charts.find((c) => c.kind === "slowest" && c.job === job);
      chart.picked = Number(select.value);
      show(chart);
    });
  });
  document.getElementById("theme").addEventListener("click", () => setTheme(root.dataset.theme === "dark" ? "light" : "dark"));
  darkSystem.addEventListener("change", (event) => setTheme(event.matches ? "dark" : "light"));
  let before = "light";
  addEventListener("beforeprint", () => {
    before = root.dataset.theme;
    document.querySelectorAll("details").forEach((details) => (details.open = true));
    setTheme("light");
  });
  addEventListener("afterprint", () => setTheme(before));
  addEventListener("resize", () => charts.forEach((chart) => chart.drawn.resize()));
  setTheme(darkSystem.matches ? "dark" : "light");
  root.dataset.ready = "yes";
})();
