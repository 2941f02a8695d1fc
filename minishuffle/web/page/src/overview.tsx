// All jobs and workers of the cluster.
import { useMemo, useState } from "preact/hooks";
import type { Cluster, History, Job, Worker } from "./api";
import { bytes, count, duration, isOver, millis, short, when } from "./format";
import { Empty, Section, Spark, State, Table } from "./parts";

const ROWS_SHOWN = 100;

export function Jobs({ jobs, now }: { jobs: Job[]; now: number }) {
  const [wanted, want] = useState("");
  const [shown, show] = useState(ROWS_SHOWN);
  const found = useMemo(() => {
    const text = wanted.trim().toLowerCase();
    const matching = jobs.filter((job) => `${job.job} ${job.name} ${job.state.replaceAll("_", " ")}`.toLowerCase().includes(text));
    const rank = (job: Job) => (isOver(job.state) ? 1 : 0);
    return matching.sort((a, b) => rank(a) - rank(b) || b.submitted_at - a.submitted_at);
  }, [jobs, wanted]);
  const running = jobs.filter((job) => !isOver(job.state)).length;
  return (
    <Section title="Jobs" note={jobs.length > 0 ? `${count(running)} running, ${count(jobs.length - running)} ended` : undefined}>
      {jobs.length === 0 ? (
        <Empty>
          No jobs yet: <code>minishuffle submit keyby</code> starts one.
        </Empty>
      ) : (
        <>
          {jobs.length > 10 && (
            <label class="field search">
              <span>Find a job by number, name or state</span>
              <input type="search" value={wanted} onInput={(event) => want(event.currentTarget.value)} />
            </label>
          )}
          <Table label="Jobs">
            <thead>
              <tr>
                <th>Job</th>
                <th class="wide">Name</th>
                <th>State</th>
                <th>Tasks</th>
                <th>Submitted</th>
                <th class="number">Duration</th>
                <th class="number">Restarts</th>
                <th class="number">Rows dropped</th>
              </tr>
            </thead>
            <tbody>
              {found.slice(0, shown).map((job) => (
                <Row key={job.job} job={job} now={now} />
              ))}
            </tbody>
          </Table>
          {found.length === 0 && <Empty>No job matches.</Empty>}
          {found.length > shown && (
            <p class="more">
              <button type="button" onClick={() => show(shown + 10 * ROWS_SHOWN)}>
                Show {count(Math.min(10 * ROWS_SHOWN, found.length - shown))} more of {count(found.length)}
              </button>
            </p>
          )}
        </>
      )}
    </Section>
  );
}

function Row({ job, now }: { job: Job; now: number }) {
  const tasks = Object.entries(job.task_states).filter(([, each]) => each > 0);
  const restarts = Object.values(job.restarts).reduce((sum, each) => sum + each, 0);
  const dropped = Object.values(job.rows_dropped).reduce((sum, each) => sum + each, 0);
  return (
    <tr>
      <td>
        <a href={`#/jobs/${job.job}`}>{job.job}</a>
      </td>
      <th scope="row" class="wide">
        <a href={`#/jobs/${job.job}`}>{job.name}</a>
      </th>
      <td>
        <State state={job.state} />
      </td>
      <td>{tasks.map(([state, each]) => `${count(each)} ${state}`).join(", ")}</td>
      <td>
        <time>{when(job.submitted_at, now)}</time>
      </td>
      <td class="number">{duration((job.ended_at || now) - job.submitted_at)}</td>
      <td class={restarts > 0 ? "number alert" : "number"}>{count(restarts)}</td>
      <td class={dropped > 0 ? "number alert" : "number"}>{short(dropped)}</td>
    </tr>
  );
}

export function Workers({ cluster, history }: { cluster: Cluster; history: History }) {
  return (
    <Section title="Workers" note="Lag: how late the event loop was at most in the last ten minutes.">
      {cluster.workers.length === 0 ? (
        <Empty>
          No workers: <code>minishuffle worker start</code> starts one.
        </Empty>
      ) : (
        <Table label="Workers">
          <thead>
            <tr>
              <th class="number">Worker</th>
              <th>State</th>
              <th>Address</th>
              <th class="number">pid</th>
              <th class="number">Slots used</th>
              <th class="number">Heartbeat</th>
              <th>Event-loop lag</th>
              <th>Network segments</th>
              <th class="number">Peak memory</th>
              <th>Metrics</th>
            </tr>
          </thead>
          <tbody>
            {cluster.workers.map((worker) => (
              <WorkerRow key={worker.worker} worker={worker} history={history} />
            ))}
          </tbody>
        </Table>
      )}
    </Section>
  );
}

function WorkerRow({ worker, history }: { worker: Worker; history: History }) {
  const samples = history.workers?.find((each) => each.worker === worker.worker);
  const lag = samples?.loop_lag ?? [];
  const used = samples?.segments_used ?? [];
  const most = Math.max(0, ...lag.map((value) => value ?? 0));
  const alive = worker.state === "alive";
  const host = worker.host.includes(":") ? `[${worker.host}]` : worker.host;
  return (
    <tr>
      <th scope="row" class="number">
        {worker.worker}
      </th>
      <td>
        <State state={worker.state} /> {worker.standby && alive && <span class="note">standby</span>}
        {worker.draining && <span class="note">draining</span>}
      </td>
      <td>
        {host}:{worker.data_port}
      </td>
      <td class="number">{worker.pid}</td>
      <td class="number">{alive && !worker.standby && !worker.draining ? `${worker.slots - worker.slots_free} / ${worker.slots}` : "–"}</td>
      <td class="number">{alive ? millis(worker.heartbeat_age_seconds) : "–"}</td>
      <td>
        <Spark values={lag} label={`event-loop lag of worker ${worker.worker}, up to ${millis(most)}`} />{" "}
        <span class="note">≤ {millis(most)}</span>
      </td>
      <td>
        <Spark values={used} label={`network segments in use of worker ${worker.worker}`} />{" "}
        <span class="note">{count(used.at(-1) ?? 0)} in use</span>
      </td>
      <td class="number">{`${bytes(worker.report.network_peak_bytes)} of ${bytes(worker.report.network_cap_bytes)}`}</td>
      <td>{alive && <a href={`http://${host}:${worker.metrics_port}/metrics`}>metrics</a>}</td>
    </tr>
  );
}
