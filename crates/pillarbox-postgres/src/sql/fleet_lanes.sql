select subscription, lane, owner, epoch, revision, takeovers from cursor order by subscription, lane
