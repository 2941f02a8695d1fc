// Recoveries: what was lost, how long each step took, and the books of what it cost.
import type { Job, JobEvent } from "./api";
import { clock, count, millis } from "./format";
import { Empty, Facts, Section, Table } from "./parts";

const TOGETHER_SECONDS = 0.5;
const RECOVERIES_SHOWN = 5;
const ROWS_SHOWN = 12;
const STEPS: [string, string][] = [
  ["task rescheduled", "rescheduled"],
  ["task running", "running"],
  ["inputs reattached", "inputs"],
  ["outputs reattached", "outputs"],
  ["first record", "first record"],
];
const FIRST_RECORD = "first record";
/** Those of a task that goes on from a snapshot, in a job with a guarantee. */
const GUARANTEED_STEPS: [string, string][] = [
  ["snapshot read", "snapshot"],
  ["replayed", "replayed"],
  ["caught up", "caught up"],
];
const ENDED = new Set(["task failed", "task lost", "task abandoned", "task canceled"]);

interface Row {
  operator: number;
  index: number;
  name: string;
  how: string;
  from: number;
  to: number;
  attempt: number;
  detected: number;
  steps: Map<string, number>;
}

export interface Recovery {
  at: number;
  cause: string;
  rows: Row[];
}

/** Subtasks that recover, by the time at which their failure was detected; the newest first. */
export function recoveries(events: JobEvent[]): Recovery[] {
  const open = new Map<string, Row>();
  const rows: { row: Row; cause: string }[] = [];
  for (const event of events) {
    if (event.operator < 0) continue;
    const key = `${event.operator}/${event.index}`;
    if (ENDED.has(event.kind) || (event.kind === "task restarting" && !open.has(key))) {
      const row: Row = {
        operator: event.operator,
        index: event.index,
        name: event.text.match(/^\S.*?\[\d+\]/)?.[0] ?? "",
        how: event.kind.replace("task ", ""),
        from: event.worker,
        to: 0,
        attempt: 0,
        detected: event.at,
        steps: new Map(),
      };
      open.set(key, row);
      rows.push({ row, cause: event.text });
      continue;
    }
    const row = open.get(key);
    if (row === undefined || event.kind === "task restarting") continue;
    if (event.kind === "task rescheduled") {
      row.to = event.worker;
      row.name = event.text.match(/^.*?\[\d+\]/)?.[0] ?? row.name;
    }
    row.attempt = event.attempt;
    if (!row.steps.has(event.kind)) row.steps.set(event.kind, Math.max(0, event.at - row.detected));
  }
  const found: Recovery[] = [];
  for (const { row, cause } of rows) {
    const last = found.at(-1);
    if (last !== undefined && row.detected - last.at <= TOGETHER_SECONDS) last.rows.push(row);
    else found.push({ at: row.detected, cause, rows: [row] });
  }
  return found.reverse();
}

export function Recoveries({ job, events, name }: { job: Job; events: JobEvent[]; name: (operator: number) => string }) {
  const found = recoveries(events).filter((each) => job.state !== "canceled" || each.rows.some((row) => row.attempt > 0));
  return (
    <Section title="Recovery" id="recovery" note={found.length > 0 ? `${found.length} so far` : undefined}>
      <Books job={job} />
      {found.length === 0 && <Empty>No task has failed or was lost.</Empty>}
      {found.slice(0, RECOVERIES_SHOWN).map((recovery) => (
        <One key={recovery.at} recovery={recovery} name={name} />
      ))}
      {found.length > RECOVERIES_SHOWN && <Empty>… and {found.length - RECOVERIES_SHOWN} earlier ones, in the events</Empty>}
    </Section>
  );
}

function One({ recovery, name }: { recovery: Recovery; name: (operator: number) => string }) {
  const took = (kind: string) => Math.max(...recovery.rows.map((row) => row.steps.get(kind) ?? 0));
  const longest = Math.max(took("task running"), took("inputs reattached"), took(FIRST_RECORD), 1e-3);
  const done = recovery.rows.filter((row) => row.steps.has(FIRST_RECORD)).length;
  const later = GUARANTEED_STEPS.filter(([kind]) => recovery.rows.some((row) => row.steps.has(kind)));
  const workers = [...new Set(recovery.rows.filter((row) => row.how === "lost").map((row) => row.from))];
  const what = workers.length > 0 ? `worker ${workers.join(", ")} lost` : "task failed";
  return (
    <article class="recovery">
      <h3>
        <time>{clock(recovery.at)}</time> {what}: {recovery.rows.length} {recovery.rows.length === 1 ? "task" : "tasks"},{" "}
        {done === recovery.rows.length
          ? `all passed on records again after ${millis(took(FIRST_RECORD))}`
          : `${done} of them have passed on records again`}
      </h3>
      <p class="cause">{recovery.cause.split("\n")[0]}</p>
      <Table label={`Recovery at ${clock(recovery.at)}`}>
        <thead>
          <tr>
            <th>Subtask</th>
            <th>Worker</th>
            <th class="number">Attempt</th>
            {[...STEPS, ...later].map(([kind, title]) => (
              <th key={kind} class="number">
                {title}
              </th>
            ))}
            <th>Detected to first record</th>
          </tr>
        </thead>
        <tbody>
          {recovery.rows.slice(0, ROWS_SHOWN).map((row) => (
            <tr key={`${row.operator}/${row.index}`}>
              <th scope="row">
                {name(row.operator)}[{row.index}]
              </th>
              <td>
                {row.from}
                {row.to > 0 && ` → ${row.to}`}
              </td>
              <td class="number">{row.attempt || "–"}</td>
              {[...STEPS, ...later].map(([kind]) => (
                <td key={kind} class="number">
                  {row.steps.has(kind) ? millis(row.steps.get(kind)!) : "–"}
                </td>
              ))}
              <td>
                <Bar row={row} longest={longest} />
              </td>
            </tr>
          ))}
        </tbody>
      </Table>
      {recovery.rows.length > ROWS_SHOWN && <Empty>… and {recovery.rows.length - ROWS_SHOWN} more subtasks</Empty>}
    </article>
  );
}

/** From the detection to the first record, each step in a shade of its own. */
function Bar({ row, longest }: { row: Row; longest: number }) {
  const reached = STEPS.map(([kind], number) => ({ kind, number, at: row.steps.get(kind) ?? Infinity }))
    .filter((step) => step.at <= longest)
    .sort((a, b) => a.at - b.at);
  return (
    <span class="track" aria-hidden="true">
      {reached.map((step, position) => {
        const from = reached[position - 1]?.at ?? 0;
        const style = { left: `${(from / longest) * 100}%`, width: `${((step.at - from) / longest) * 100}%` };
        return <span key={step.kind} class={`step s${step.number}`} style={style} title={step.kind} />;
      })}
    </span>
  );
}

function Books({ job }: { job: Job }) {
  const restarts = Object.entries(job.restarts).filter(([, each]) => each > 0);
  const dropped = Object.entries(job.rows_dropped).filter(([, each]) => each > 0);
  const sum = dropped.reduce((total, [, each]) => total + each, 0);
  const list = (found: [string, number][]) => found.map(([why, each]) => `${count(each)} ${why.replaceAll("_", " ")}`).join(", ");
  return (
    <Facts
      facts={[
        ["Restarts", restarts.length > 0 ? list(restarts) : "none"],
        ["Rows dropped", sum > 0 ? `${count(sum)} (${list(dropped)})` : "none"],
        ["Rows in flight in what died", job.rows_in_flight > 0 ? `up to ${count(job.rows_in_flight)}` : "none"],
        ["Entries of state (keys) lost", job.state_rows_lost > 0 ? count(job.state_rows_lost) : "none"],
        ["Rows emitted twice", job.rows_again > 0 ? `up to ${count(job.rows_again)}` : "none"],
      ]}
    />
  );
}
