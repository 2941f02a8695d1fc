// What throttles a job, as `minishuffle diagnose` says it.
import type { Diagnosis, Evidence, Graph } from "./api";
import { usePoll } from "./api";
import { count } from "./format";
import { Empty, Facts, Section } from "./parts";

const PAUSE_MS = 5000;
const ANSWER_MS = 15_000;
const PATH = "diagnosis";

export function Diagnosed({ job, graph, choose }: { job: string; graph: Graph; choose: (vertex: number) => void }) {
  const { data } = usePoll<Diagnosis>(`jobs/${job}/${PATH}`, PAUSE_MS, null, ANSWER_MS);
  return (
    <Section title="Diagnosis" id="diagnosis" note="By the last half minute, or since the job began.">
      {data === null ? (
        <Empty>looking at the job …</Empty>
      ) : data.verdict === "healthy" ? (
        <p>
          <span class="state good">
            <span aria-hidden="true">●</span> Nothing is wrong
          </span>
          : no task waits for another to take its rows.
        </p>
      ) : data.verdict === "waiting" ? (
        <Waiting found={data} />
      ) : (
        <Throttled found={data} graph={graph} choose={choose} />
      )}
    </Section>
  );
}

function Waiting({ found }: { found: Diagnosis }) {
  return (
    <>
      <p>
        <span class="state warn">
          <span aria-hidden="true">▲</span> {found.rule}
        </span>
        : {shown(found.evidence.why!)}.
      </p>
      <p>What to do: {found.advice}.</p>
    </>
  );
}

function Throttled({ found, graph, choose }: { found: Diagnosis; graph: Graph; choose: (vertex: number) => void }) {
  const vertex = graph.vertices.findIndex((each) => found.task.startsWith(`${each.name}[`));
  return (
    <>
      <p>
        <span class="state warn">
          <span aria-hidden="true">▲</span> {found.rule}
        </span>
        :{" "}
        <button type="button" onClick={() => choose(Math.max(0, vertex))}>
          {found.task}
        </button>{" "}
        throttles the job.
      </p>
      <p>What to do: {found.advice}.</p>
      <details>
        <summary>Numbers</summary>
        <Facts facts={Object.entries(found.evidence).map(([name, value]) => [name.replaceAll("_", " "), shown(value)])} />
      </details>
    </>
  );
}

function shown(value: Evidence): string {
  if (Array.isArray(value)) {
    return value.map((each) => (typeof each === "object" ? `${each.key} (${Math.round(each.share * 100)} %)` : String(each))).join(", ") || "none";
  }
  if (typeof value !== "number") return value;
  return Number.isInteger(value) || Math.abs(value) >= 1000 ? count(value) : String(Number(value.toPrecision(3)));
}
