// One job: its graph, the chosen vertex, its recoveries and what happened.
import { useEffect, useState } from "preact/hooks";
import type { Graph, Job, JobEvent, Loads } from "./api";
import { useEvents, useHistory, usePoll } from "./api";
import { Cancel, Pause, Resume } from "./cancel";
import { Diagnosed } from "./diagnosis";
import { clock, count, duration, isOver, moment, rate } from "./format";
import { JobGraph } from "./graph";
import { Log } from "./logs";
import { Empty, Facts, Section, State, Table } from "./parts";
import { Settings } from "./settings";
import { Recoveries } from "./timeline";
import { Vertex } from "./vertex";

const POLL_MS = 2000;
const GRAPH_MS = 60_000;
const EVENTS_SHOWN = 100;

/** What restarts with a task that fails, and what becomes of the rows for it until then. */
function onFailure(graph: Graph): string {
  if (graph.restart_strategy === "none") return "the job fails";
  const what = { individual: "that task restarts", region: "its region restarts", full: "all tasks restart" }[graph.restart_strategy];
  return `${what}; rows for it ${graph.on_unavailable === "drop" ? "are dropped" : "wait"} meanwhile`;
}

export function JobView({ id, now, narrow }: { id: string; now: number; narrow: boolean }) {
  const events = useEvents(id);
  const latest = events.at(-1)?.number ?? 0;
  const { data: job, error } = usePoll<Job>(`jobs/${id}`, POLL_MS, latest);
  const { data: graph } = usePoll<Graph>(`jobs/${id}/graph`, GRAPH_MS);
  const { data: loads } = usePoll<Loads>(`jobs/${id}/loads`, POLL_MS);
  const history = useHistory(`jobs/${id}/history`, POLL_MS);
  const [picked, pick] = useState<number | null>(null);
  const last = useLast(job);
  useEffect(() => {
    document.title = last === null ? `${id} · minishuffle` : `${last.name} (${id}) · minishuffle`;
  }, [last?.name, id]);

  if (error !== "") {
    return (
      <Section title={`Job ${id}`}>
        <Empty>{error}</Empty>
        <p>
          <a href="#/">All jobs</a>
        </p>
      </Section>
    );
  }
  if (last === null || graph === null) return <Empty>reading job {id} …</Empty>;
  const runs = !isOver(last.state);
  const vertices = loads?.vertices ?? [];
  const most = vertices.reduce((best, each, number) => (each.busy > (vertices[best]?.busy ?? 0) ? number : best), 0);
  const chosen = picked ?? most;
  const name = (operator: number) => graph.vertices[operator]?.name ?? String(operator);
  const sources = vertices.filter((_, number) => graph.vertices[number]?.is_source);
  return (
    <>
      <div class="title">
        <p class="crumbs">
          <a href="#/">Jobs</a> / {last.job}
        </p>
        <h1>{last.name}</h1>
        <State state={last.state} />
        {last.state === "running" && <Pause job={last.job} name={last.name} />}
        {["pausing", "paused"].includes(last.state) && <Resume job={last.job} name={last.name} />}
        {runs && last.state !== "canceling" && <Cancel job={last.job} name={last.name} />}
      </div>
      <Facts
        facts={[
          ["Submitted", moment(last.submitted_at)],
          [runs ? "Runs for" : "Ran for", duration((last.ended_at || now) - last.submitted_at)],
          ["Subtasks", count(last.tasks.length)],
          ["Out of sources", runs ? rate(sources.reduce((sum, each) => sum + each.records_out, 0)) : "–"],
          ["On failure", onFailure(graph)],
        ]}
      />
      {last.causes.length > 0 && <Causes job={last} />}
      {last.slot_waits.map((wait) => (
        <p key={wait.worker} class="failure">
          {wait.text}; the job fails in {duration(Math.max(0, wait.until - now))} if none comes.
        </p>
      ))}
      {last.deploy_waits.map((wait) => (
        <p key={wait.text} class="note">
          {wait.text}.
        </p>
      ))}
      <Section title="Job graph" note="A vertex is as back-pressured as the worst of its subtasks: OK up to 10 % of its time, LOW, HIGH above 50 %.">
        <JobGraph graph={graph} job={last} loads={vertices} chosen={chosen} choose={pick} narrow={narrow} />
      </Section>
      {runs && <Diagnosed job={last.job} graph={graph} choose={pick} />}
      <Vertex graph={graph} job={last} number={chosen} load={vertices[chosen]} history={history} runs={runs} />
      <Recoveries job={last} events={events} name={name} />
      <Log job={last} />
      <Events events={events} />
      <Settings graph={graph} />
    </>
  );
}

/** The last job that was read, so that the page does not go blank while the coordinator is gone. */
function useLast(job: Job | null): Job | null {
  const [last, set] = useState<Job | null>(null);
  useEffect(() => {
    if (job !== null) set(job);
  }, [job]);
  return job ?? last;
}

function Causes({ job }: { job: Job }) {
  const [first, ...others] = job.causes;
  return (
    <Section title={job.state === "failed" || job.state === "failing" ? "Why it failed" : "Causes"}>
      <p class="failure">{first!.text.split("\n")[0]}</p>
      {first!.traceback !== "" && (
        <details>
          <summary>Traceback{first!.task !== "" && ` of ${first!.task}`}</summary>
          <pre tabIndex={0}>{first!.traceback}</pre>
        </details>
      )}
      {others.map((cause, number) => (
        <p key={number} class="note">
          then: {cause.text.split("\n")[0]}
        </p>
      ))}
    </Section>
  );
}

function Events({ events }: { events: JobEvent[] }) {
  return (
    <Section title="Events" note={events.length > EVENTS_SHOWN ? `the last ${EVENTS_SHOWN} of ${count(events.length)}` : undefined}>
      <Table label="Events, the newest first" tall>
        <thead>
          <tr>
            <th>Time</th>
            <th>Event</th>
            <th class="wide">Text</th>
          </tr>
        </thead>
        <tbody>
          {events
            .slice(-EVENTS_SHOWN)
            .reverse()
            .map((event) => (
              <tr key={event.number}>
                <td>
                  <time>{clock(event.at)}</time>
                </td>
                <td class="kind">{event.kind}</td>
                <td class="wide">{event.text.split("\n")[0]}</td>
              </tr>
            ))}
        </tbody>
      </Table>
    </Section>
  );
}
