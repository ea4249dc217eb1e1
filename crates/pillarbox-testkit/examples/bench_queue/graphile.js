// Runs a graphile-worker with a local queue until its task has had COUNT jobs and prints the milliseconds that took; with a COUNT
// of 0 it only makes the schema. Arguments: URL COUNT.
const { Logger, makeWorkerUtils, run } = require("graphile-worker");

const [connectionString, count] = process.argv.slice(-2);
const errors = (level, message) => level === "error" && console.error(message);
const logger = new Logger(() => errors);

async function makeSchema() {
  const utils = await makeWorkerUtils({ connectionString, logger });
  await utils.migrate();
  await utils.release();
}

async function drain(expected) {
  let handled = 0;
  let finish;
  const finished = new Promise((resolve) => (finish = resolve));
  const event = async () => {
    handled += 1;
    if (handled === expected) finish();
  };
  const worker = {
    connectionString,
    logger,
    concurrentJobs: 24,
    maxPoolSize: 12,
    localQueue: { size: 500 },
    completeJobBatchDelay: 0,
    failJobBatchDelay: 0,
  };
  const started = performance.now();
  await run({ preset: { worker }, noHandleSignals: true, taskList: { event } });
  await finished;
  console.log(performance.now() - started);
}

const work = Number(count) > 0 ? drain(Number(count)) : makeSchema();
work.then(
  () => process.exit(0),
  (error) => {
    console.error(error);
    process.exit(1);
  },
);
