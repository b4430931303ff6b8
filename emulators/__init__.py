"""Two clouds on one machine, for rehearsals and tests: `isthmus.emulators.sagemaker` and `isthmus.emulators.azureml`.

They answer the clouds' own client libraries, refuse what the services refuse, and really run the jobs: hosts are network,
process and mount namespaces. They know nothing of recipes or backends; what they get is the request that a cloud would get.
"""
