"""The processes of a job: who they are and how they find each other."""
