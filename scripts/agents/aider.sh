# The test fails once, so that it asks again.
export LITELLM_LOCAL_MODEL_COST_MAP=True
touch answer.txt
python -m aider --model "openai/$OPENAI_MODEL" --yes-always --no-git --no-check-update --no-show-model-warnings --no-pretty \
    --analytics-disable --auto-test --test-cmd "grep -w 42 answer.txt" --message "$1" answer.txt
cat answer.txt
